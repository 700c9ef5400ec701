-- Whose a call is: the client's name or, without keys, the address that Envoy has seen and appended to those that the
-- caller may have sent. The listeners have IPv4 alone; the pattern, which is not anchored, sees no more than an address.

return function(headers)
  return headers:get("x-headrace-client") or (headers:get("x-forwarded-for") or ""):sub(-15):match("[^,%s]*$")
end
