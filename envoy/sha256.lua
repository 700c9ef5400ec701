-- SHA-256 (FIPS 180-4) of texts below 8 KiB, in hexadecimal: Envoy's Lua has no digest of its own.

local bit = require("bit")
local band, bnot, bxor, ror, rshift, tobit = bit.band, bit.bnot, bit.bxor, bit.ror, bit.rshift, bit.tobit

-- The fractional parts of the roots of the first primes: square roots for the initial state, cube roots for the rounds.
local INITIAL = {
  0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
}
local ROUNDS = {
  0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
  0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
  0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
  0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
  0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
  0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
  0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
  0xc67178f2,
}

local function add_block(state, text, from)
  local words = {}
  for i = 1, 16 do
    local a, b, c, d = text:byte(from + 4 * i - 4, from + 4 * i - 1)
    words[i] = tobit(a * 16777216 + b * 65536 + c * 256 + d)
  end
  for i = 17, 64 do
    local low, high = words[i - 15], words[i - 2]
    local first = bxor(ror(low, 7), ror(low, 18), rshift(low, 3))
    local second = bxor(ror(high, 17), ror(high, 19), rshift(high, 10))
    words[i] = tobit(words[i - 16] + first + words[i - 7] + second)
  end
  local a, b, c, d, e, f, g, h = unpack(state)
  for i = 1, 64 do
    local choice = bxor(band(e, f), band(bnot(e), g))
    local first = h + bxor(ror(e, 6), ror(e, 11), ror(e, 25)) + choice + ROUNDS[i] + words[i]
    local majority = bxor(band(a, b), band(a, c), band(b, c))
    local second = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + majority
    a, b, c, d, e, f, g, h = tobit(first + second), a, b, c, tobit(d + first), e, f, g
  end
  for i, value in ipairs({ a, b, c, d, e, f, g, h }) do
    state[i] = tobit(state[i] + value)
  end
end

return function(text)
  local padded = text .. "\128" .. ("\0"):rep((55 - #text) % 64 + 6) .. string.char(math.floor(#text / 32), #text * 8 % 256)
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
