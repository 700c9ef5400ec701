-- Whose a call is: the client's name or, without keys, the address that Envoy has seen and appended to those that the
-- caller may have sent. All addresses of an IPv6 network of 64 bits are one caller, as in millrace/clients.py.

local MAX_ADDRESS_BYTES = 46 -- The longest is shorter; a pattern that is not anchored sees no more.

return function(headers)
  local client = headers:get("x-millrace-client")
  if client then
    return client
  end
  local address = (headers:get("x-forwarded-for") or ""):sub(-MAX_ADDRESS_BYTES):match("[^,%s]*$")
  if not address:find(":", 1, true) then
    return address
  end
  local before, after = address:match("^(.-)::(.*)$")
  local _, count = (after or ""):gsub("%x+", "")
  local groups = {}
  for group in (before or address):gmatch("%x+") do
    groups[#groups + 1] = group
  end
  for _ = #groups + 1, before and math.min(4, 8 - count) or 0 do
    groups[#groups + 1] = "0"
  end
  for group in (after or ""):gmatch("%x+") do
    groups[#groups + 1] = group
  end
  return table.concat(groups, ":", 1, math.min(4, #groups))
end
