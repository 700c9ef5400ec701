-- Who calls: whether a web page may (else 403), whose key a call carries (401), and whether the operator's methods are closed to
-- it. The client's name and policy go on as headers (headrace/clients.py), the key does not. The transformer keeps a file of
-- digests (services/transformer/headrace_transformer/keys.py): a line each, with digest, name, role and the rest of the policy
-- between tabs. jwt_authn has verified tokens before; an entry with the name of a token's subject gives its policy.

local mark = require("mark")
local sha256 = require("sha256")
local watched_file = require("watched_file")

local KEY_FILE = os.getenv("KEY_DIGESTS") or ""
local JWT = (os.getenv("GATEWAY_JWKS") or "") ~= "" and "envoy.filters.http.jwt_authn"
local MAX_KEY_BYTES = 512
-- Paths that need no key: probes, and the playground, which asks for one.
local OPEN_PATHS = {
  ["/"] = true, ["/favicon.ico"] = true, ["/health"] = true, ["/v2/health/live"] = true, ["/v2/health/ready"] = true,
  ["/inference.GRPCInferenceService/ServerLive"] = true, ["/inference.GRPCInferenceService/ServerReady"] = true,
}
-- The routes refuse what is closed, for they see the method that a REST path means: under `log` the payload log, under
-- `settings` load, unload, settings and development, under `tokens` inference at a predictor, which counts no tokens.
local MANAGEMENT = "headrace.management"
local MANAGEMENT_IS_CLOSED = os.getenv("PUBLIC_MANAGEMENT") == "false" -- But at its own listener, without keys.
local MANAGEMENT_ADDRESS = ":" .. (os.getenv("MANAGEMENT_PORT") or "8081") .. "$"
-- A browser sends by plain HTTP to a name no Sec-Fetch-…, and of a page that reads from its own name no Origin. What a page
-- cannot keep it from sending is its languages; the rest is more certain than needed.
local BROWSERS_SEND = { "accept-language", "origin", "sec-fetch-mode", "sec-fetch-site", "cookie", "referer" }
-- Whoever owns a name in the public DNS can make it lead to this machine, and a page of that name then has the gateway's
-- origin. An address, a name without a dot, and one under the top-level domains localhost and internal belong to no stranger.
local OUR_HOSTS = { "^[^.]*$", "^%d+%.%d+%.%d+%.%d+$", "^%[[%x:.]+%]$", "%.localhost$", "%.internal$" }
local FLOOD = 2 -- Times the requests a second that a key allows: the services refuse what is below, as they count it.

-- The items of a comma list in an environment variable, which may be "*".
local function list_of(variable)
  local items = {}
  for item in (os.getenv(variable) or ""):gmatch("[^,%s]+") do
    items[item:lower()] = true
  end
  return items
end

local HOSTS, ORIGINS = list_of("GATEWAY_HOSTS"), list_of("GATEWAY_ALLOWED_ORIGINS")

-- A client with its policy, which is given without its role.
local function client_with(name, role, policy)
  return {
    name = name,
    role = role,
    policy = '{"role":"' .. role .. '"' .. (policy ~= "" and "," or "") .. policy .. "}",
    per_second = tonumber(policy:match('"requests_per_second":(%d+)') or ""),
    per_minute = tonumber(policy:match('"requests_per_minute":(%d+)') or ""),
    counts_tokens = policy:find('"tokens_per_', 1, true) ~= nil,
  }
end

local keys = watched_file(KEY_FILE, function(text)
  local read = { by_digest = {}, policies = {}, by_key = {} }
  for digest, name, role, policy in text:gmatch("(%x+)\t([^\t\n]+)\t(%a+)\t([^\t\n]*)\n") do
    read.by_digest[digest] = client_with(name, role, policy)
    read.policies[name] = policy
  end
  return read
end)

-- The key of a call: that of `authorization`, if it is a Bearer's, else `x-api-key`.
local function key_of(headers)
  local scheme, key = (headers:get("authorization") or ""):match("^(%a+) +(%S+)$")
  return scheme and scheme:lower() == "bearer" and key or headers:get("x-api-key")
end

-- The client of a key; its digest is made once, as long as the file is the same.
local function client_of_key(known, key)
  if known.by_key[key] == nil and #key <= MAX_KEY_BYTES then
    known.by_key[key] = known.by_digest[sha256(key)]
  end
  return known.by_key[key]
end

-- The client that a verified token names, if there is one; the header of such a token is gone.
local function client_of_token(handle, known)
  local verified = JWT and handle:streamInfo():dynamicMetadata():get(JWT)
  local payload = verified and verified["jwt"]
  local name = payload and payload["sub"]
  if type(name) ~= "string" or #name > 128 or not name:find("^[%w._:@|-]+$") then
    return nil
  end
  local role = payload["headrace_role"] == "admin" and "admin" or "user"
  return client_with(name, role, known and known.policies[name] or "")
end

local function is_browser(headers)
  for _, name in ipairs(BROWSERS_SEND) do
    if headers:get(name) then
      return true
    end
  end
  return (headers:get("user-agent") or ""):find("^Mozilla/") ~= nil
end

local function is_our_host(authority)
  local host = authority:gsub(":%d*$", "")
  for _, pattern in ipairs(OUR_HOSTS) do
    if host:find(pattern) then
      return true
    end
  end
  return HOSTS[host]
end

-- Why the page that sends a request may not call, if so. A browser names the page's origin in every request that could
-- change something, and in every one to another origin that could read an answer. Programs call by any name.
local function check_page(headers)
  local authority, origin = (headers:get(":authority") or ""):lower(), headers:get("origin")
  if not HOSTS["*"] and not is_our_host(authority) and is_browser(headers) then
    return "pages of this host name may not call; GATEWAY_HOSTS lists those that may"
  end
  origin = origin and origin:lower()
  if origin and not ORIGINS["*"] and origin:match("^https?://(.+)$") ~= authority and not ORIGINS[origin] then
    return "pages of this origin may not call; GATEWAY_ALLOWED_ORIGINS lists those that may"
  end
end

local buckets = {} -- Of tokens, by client.

-- Whether a call of a client with a limit is one of a flood: a worker's bucket holds the limit and gets FLOOD of it a second.
local function is_flood(handle, client)
  local now, limit = handle:timestamp(EnvoyTimestampResolution.MILLISECOND), client.per_second
  local bucket = buckets[client.name] or { left = limit, at = now }
  buckets[client.name] = bucket
  bucket.left = math.min(limit, bucket.left + FLOOD * limit * math.max(0, now - bucket.at) / 1000)
  bucket.at = now
  if bucket.left < 1 then
    return true
  end
  bucket.left = bucket.left - 1
  return false
end

-- Replaces a call's key by its client; the status and the message with which the call is refused otherwise.
local function check_key(handle, headers)
  local known, key = keys(), key_of(headers)
  local client = known and key and client_of_key(known, key) or client_of_token(handle, known)
  local path = (headers:get(":path") or ""):match("^[^?]*")
  local is_open = OPEN_PATHS[path] or path:find("^/playground/") or path:find("^/grpc%.health%.v1%.Health/")
  headers:remove("authorization")
  if headers:get("x-api-key") and not headers:get("anthropic-version") then
    -- Who has the key where Anthropic's clients have it gets the models in Anthropic's shape.
    headers:add("anthropic-version", "2023-06-01")
    handle:clearRouteCache()
  end
  headers:remove("x-api-key")
  if client == nil then
    if is_open then
      return nil
    elseif KEY_FILE ~= "" and known == nil then
      return "503", "the transformer has not read the keys yet"
    end
    return "401", key and "this key is not known" or "a key is needed, as Authorization: Bearer or x-api-key"
  end
  headers:replace("x-headrace-client", client.name)
  headers:replace("x-headrace-policy", client.policy)
  if client.role ~= "admin" then
    mark(handle, MANAGEMENT, "settings")
  end
  if client.counts_tokens then
    mark(handle, MANAGEMENT, "tokens")
  end
  if client.per_second and not is_open and is_flood(handle, client) then
    return "429", client.name .. " has made more than twice the requests that its key allows in a second"
  elseif client.per_minute and not is_open then -- For the filter that asks GATEWAY_RATE_LIMIT_SERVICE.
    local metadata = handle:streamInfo():dynamicMetadata()
    metadata:set("headrace.limits", "client", client.name)
    metadata:set("headrace.limits", "requests", { requests_per_unit = client.per_minute, unit = "MINUTE" })
  end
end

-- The status and the message with which a call is refused for who sends it; nil for one that may call.
return function(handle, headers)
  local refusal = check_page(headers)
  if refusal then
    return "403", refusal
  elseif KEY_FILE ~= "" or JWT then
    return check_key(handle, headers)
  elseif MANAGEMENT_IS_CLOSED and not handle:streamInfo():downstreamLocalAddress():find(MANAGEMENT_ADDRESS) then
    mark(handle, MANAGEMENT, "settings")
    mark(handle, MANAGEMENT, "log")
  end
end
