-- Requests of clients: what is refused here, and what a rate limit service counts for all who ask it
-- (GATEWAY_RATE_LIMIT_SERVICE).
--
-- The services refuse what goes beyond `requests_per_second` (headrace/rpc/limits/client_limits.py). Of a client that goes on, what
-- is beyond twice its limit is refused here, where it costs no service anything: a token bucket in each worker, which holds
-- the limit and gets twice that in a second.
--
-- Envoy's filter asks the service of the calls that are marked here, by the client's name and with the limit of its key. By
-- the answer it writes `x-ratelimit-limit` ("600, 600;w=60"), `x-ratelimit-remaining` and `x-ratelimit-reset` (seconds),
-- which become the headers of OpenAI's API. These replace what the process that answered counts of its own
-- (headrace/rpc/limits/client_limits.py).

local METADATA = "headrace.limits"
local IS_ON = (os.getenv("GATEWAY_RATE_LIMIT_SERVICE") or "") ~= ""

local FLOOD = 2 -- Times the limit.
local buckets = {} -- By client.

local rate_limits = {}

-- The requests that a policy allows in a second; nil without a limit.
function rate_limits.per_second_of(policy)
  return tonumber(policy:match('"requests_per_second":(%d+)') or "")
end

-- Whether a call of a client with such a limit is one of a flood.
function rate_limits.is_flood(handle, client)
  local now, limit = handle:timestamp(EnvoyTimestampResolution.MILLISECOND), client.per_second
  local bucket = buckets[client.name]
  if bucket == nil then
    bucket = { left = limit, at = now }
    buckets[client.name] = bucket
  end
  bucket.left = math.min(limit, bucket.left + FLOOD * limit * math.max(0, now - bucket.at) / 1000)
  bucket.at = now
  if bucket.left < 1 then
    return true
  end
  bucket.left = bucket.left - 1
  return false
end

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
