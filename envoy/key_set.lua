-- The key set of GATEWAY_JWKS as jwt_authn takes it. That refuses a set without keys and keeps the last good one, whose
-- tokens would stay valid: instead of such a set it gets one with a key that is nobody's.
--
-- The key is a point of the curve for which nobody knows a private key: its x is the SHA-256 of "headrace: nobody's key 1",
-- the first number for which there is such a point.

local EMPTY = '"keys"%s*:%s*%[%s*%]'
local NOBODY = '{"keys":[{"kty":"EC","crv":"P-256","alg":"ES256","use":"sig","kid":"nobody",'
  .. '"x":"S2pIEYj1WLbLakWc8Iz7V3anfrO5uUEeUUiTwmM9tTY","y":"WtL0qdXJjHn7x-yY-jaqJikIe2hx63-XEzuNhMrf-SY"}]}'

function envoy_on_response(handle)
  local body = handle:body()
  if body and body:getBytes(0, body:length()):find(EMPTY) then
    handle:headers():replace("content-length", tostring(body:setBytes(NOBODY)))
  end
end
