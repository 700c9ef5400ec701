-- SHA-256 (FIPS 180-4) of texts below 8 KiB, in hexadecimal: Envoy's Lua has no digest of its own.

local bit = require("bit")
local band, bnot, bxor, ror, rshift = bit.band, bit.bnot, bit.bxor, bit.ror, bit.rshift

-- The first 32 bits of the fractional part of a positive number.
local function fraction(number)
  return bit.tobit(math.floor((number - math.floor(number)) * 2 ^ 32))
end

-- Of the roots of the first primes: square roots for the initial state, cube roots for the rounds.
local INITIAL, ROUNDS = {}, {}
local candidate = 2
while #ROUNDS < 64 do
  local is_prime = true
  for divisor = 2, math.floor(math.sqrt(candidate)) do
    is_prime = is_prime and candidate % divisor ~= 0
  end
  if is_prime then
    if #INITIAL < 8 then
      INITIAL[#INITIAL + 1] = fraction(math.sqrt(candidate))
    end
    ROUNDS[#ROUNDS + 1] = fraction(candidate ^ (1 / 3))
  end
  candidate = candidate + 1
end

local function add_block(state, text, from)
  local words = {}
  for i = 1, 16 do
    local a, b, c, d = text:byte(from + 4 * i - 4, from + 4 * i - 1)
    words[i] = bit.tobit(a * 16777216 + b * 65536 + c * 256 + d)
  end
  for i = 17, 64 do
    local low, high = words[i - 15], words[i - 2]
    local first = bxor(ror(low, 7), ror(low, 18), rshift(low, 3))
    local second = bxor(ror(high, 17), ror(high, 19), rshift(high, 10))
    words[i] = bit.tobit(words[i - 16] + first + words[i - 7] + second)
  end
  local a, b, c, d, e, f, g, h = unpack(state)
  for i = 1, 64 do
    local choice = bxor(band(e, f), band(bnot(e), g))
    local first = h + bxor(ror(e, 6), ror(e, 11), ror(e, 25)) + choice + ROUNDS[i] + words[i]
    local majority = bxor(band(a, b), band(a, c), band(b, c))
    local second = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + majority
    a, b, c, d, e, f, g, h = bit.tobit(first + second), a, b, c, bit.tobit(d + first), e, f, g
  end
  for i, value in ipairs({ a, b, c, d, e, f, g, h }) do
    state[i] = bit.tobit(state[i] + value)
  end
end

return function(text)
  local bits = #text * 8
  local padding = "\128" .. string.rep("\0", (55 - #text) % 64)
  local padded = text .. padding .. string.rep("\0", 6) .. string.char(math.floor(bits / 256), bits % 256)
  local state = { unpack(INITIAL) }
  for from = 1, #padded, 64 do
    add_block(state, padded, from)
  end
  local digits = {}
  for i, value in ipairs(state) do
    digits[i] = bit.tohex(value)
  end
  return table.concat(digits)
end
