-- Requests of clients, counted by a rate limit service for all who ask it (GATEWAY_RATE_LIMIT_SERVICE).
--
-- Envoy's filter asks it of the calls that are marked here, by the client's name and with the limit of its key. By the
-- answer it writes `x-ratelimit-limit` ("600, 600;w=60"), `x-ratelimit-remaining` and `x-ratelimit-reset` (seconds),
-- which become the headers of OpenAI's API. These replace what the process that answered counts of its own
-- (millrace/rpc/client_limits.py).

local METADATA = "millrace.limits"
local IS_ON = (os.getenv("GATEWAY_RATE_LIMIT_SERVICE") or "") ~= ""

local rate_limits = {}

-- The requests that a policy allows in a minute, as Envoy's protocol has it; nil without a limit or a service.
function rate_limits.limit_of(policy)
  local requests = IS_ON and policy:match('"requests_per_minute":(%d+)')
  return requests and { requests_per_unit = tonumber(requests), unit = "MINUTE" } or nil
end

-- Has the service asked about a call of this client.
function rate_limits.mark(handle, client)
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set(METADATA, "client", client.name)
  metadata:set(METADATA, "requests", client.limit)
end

-- Seconds as OpenAI writes them: 1s, 6m0s.
local function duration(seconds)
  if seconds < 60 then
    return string.format("%ds", seconds)
  end
  return string.format("%dm%ds", math.floor(seconds / 60), seconds % 60)
end

-- What remains, in the headers of an answer.
function rate_limits.rename(handle)
  if not IS_ON then
    return
  end
  local headers = handle:headers()
  local limit = (headers:get("x-ratelimit-limit") or ""):match("^%d+")
  if limit == nil then
    return
  end
  local reset_s = tonumber(headers:get("x-ratelimit-reset")) or 0
  headers:replace("x-ratelimit-limit-requests", limit)
  headers:replace("x-ratelimit-remaining-requests", headers:get("x-ratelimit-remaining") or "0")
  headers:replace("x-ratelimit-reset-requests", duration(reset_s))
  for _, name in ipairs({ "limit", "remaining", "reset" }) do
    headers:remove("x-ratelimit-" .. name)
  end
  if headers:get("x-envoy-ratelimited") then
    headers:remove("x-envoy-ratelimited")
    headers:replace("retry-after-ms", string.format("%d", math.max(reset_s, 1) * 1000))
  end
end

return rate_limits
