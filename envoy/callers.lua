-- Who calls: whether a web page may, whose key a call carries, and whether the operator's methods are closed to it.
--
-- A page of another origin may not call, nor may one whose host's name was made to lead here (403, PERMISSION_DENIED).
-- With keys (GATEWAY_KEYS, GATEWAY_JWKS) a call needs one (401, UNAUTHENTICATED), but for health and the playground's
-- files. The client's name and policy go on as headers (headrace/clients.py), the key does not. The transformer keeps the
-- digests of the keys in a file, which is read again once a second (services/transformer/headrace_transformer/keys.py): a line each, with
-- digest, name, role and the rest of the policy between tabs. Tokens (JWT) are verified by Envoy's jwt_authn before; an
-- entry with the name of a token's subject gives its policy.

local rate_limits = require("rate_limits")
local sha256 = require("sha256")
local watched_file = require("watched_file")

local CLIENT, POLICY = "x-headrace-client", "x-headrace-policy"
local FILE = os.getenv("KEY_DIGESTS") or ""
local JWT = (os.getenv("GATEWAY_JWKS") or "") ~= "" and "envoy.filters.http.jwt_authn"
local NEEDS_KEY = FILE ~= "" or JWT
local MAX_KEY_BYTES = 512
-- Paths that need no key: probes, and the playground, which asks for one.
local OPEN_PATHS = {
  ["/"] = true, ["/favicon.ico"] = true, ["/health"] = true, ["/v2/health/live"] = true, ["/v2/health/ready"] = true,
  ["/inference.GRPCInferenceService/ServerLive"] = true, ["/inference.GRPCInferenceService/ServerReady"] = true,
}

-- The routes refuse what is closed, for they see the method that a REST path means: under `log` the payload log, under
-- `settings` load and unload, the settings of logs and traces, and development, under `tokens` inference at a predictor,
-- which does not count the tokens of a key.
local MANAGEMENT = "headrace.management"
-- Without keys: whether both are closed but at the management listener.
local MANAGEMENT_IS_CLOSED = os.getenv("PUBLIC_MANAGEMENT") == "false"
local MANAGEMENT_ADDRESS = ":" .. (os.getenv("MANAGEMENT_PORT") or "8081") .. "$"

-- The items of a comma list in an environment variable, and whether it is "*".
local function list_of(variable)
  local items, text = {}, os.getenv(variable) or ""
  for item in text:gmatch("[^,%s]+") do
    items[item:lower()] = true
  end
  return items, text == "*"
end

local HOSTS, ANY_HOST = list_of("GATEWAY_HOSTS")
local ORIGINS, ANY_ORIGIN = list_of("GATEWAY_ALLOWED_ORIGINS")

local key_digests = watched_file(FILE)
local content = nil -- Of that file, nil while there is none.
local client_of_digest, policy_of_name, client_of_key = {}, {}, {}

-- A client with its policy, which is given without its role.
local function client_with(name, role, policy)
  return {
    name = name,
    role = role,
    policy = '{"role":"' .. role .. '"' .. (policy ~= "" and "," or "") .. policy .. "}",
    limit = rate_limits.limit_of(policy),
    per_second = rate_limits.per_second_of(policy),
    counts_tokens = policy:find('"tokens_per_', 1, true) ~= nil,
  }
end

local function read_again()
  local has_changed
  content, has_changed = key_digests()
  if not has_changed then
    return
  end
  client_of_digest, policy_of_name, client_of_key = {}, {}, {}
  for digest, name, role, policy in (content or ""):gmatch("(%x+)\t([^\t\n]+)\t(%a+)\t([^\t\n]*)\n") do
    client_of_digest[digest] = client_with(name, role, policy)
    policy_of_name[name] = policy
  end
end

-- The key of a call: that of `authorization`, if it is a Bearer's, else `x-api-key`.
local function key_of(headers)
  local scheme, key = (headers:get("authorization") or ""):match("^(%a+) +(%S+)$")
  return scheme and scheme:lower() == "bearer" and key or headers:get("x-api-key")
end

-- The client that a verified token names, if there is one.
local function client_of_token(handle)
  local verified = JWT and handle:streamInfo():dynamicMetadata():get(JWT)
  local payload = verified and verified["jwt"]
  local name = payload and payload["sub"]
  if type(name) ~= "string" or #name > 128 or not name:find("^[%w._:@|-]+$") then
    return nil
  end
  local role = payload["headrace_role"] == "admin" and "admin" or "user"
  return client_with(name, role, policy_of_name[name] or "")
end

-- jwt_authn has removed the header of a token that is valid, so that such a call may have no key.
local function client_of(handle, key)
  if key == nil then
    return client_of_token(handle)
  end
  local client = client_of_key[key]
  if client == nil and #key <= MAX_KEY_BYTES then
    client = client_of_digest[sha256(key)]
    client_of_key[key] = client -- No more than there are digests.
  end
  return client or client_of_token(handle)
end

-- Whether a browser may send a request. By plain HTTP to a name it sends no Sec-Fetch-…, and of a page that reads from its
-- own name no Origin. What a page cannot keep it from sending is its languages; the rest is more certain than needed.
local BROWSERS_SEND = { "accept-language", "origin", "sec-fetch-mode", "sec-fetch-site", "cookie", "referer" }
local function is_browser(headers)
  for _, name in ipairs(BROWSERS_SEND) do
    if headers:get(name) then
      return true
    end
  end
  return (headers:get("user-agent") or ""):find("^Mozilla/") ~= nil
end

-- Whether a request may have come to this host. Whoever owns a name in the public DNS can make it lead to this machine,
-- and a page of that name then has the gateway's origin. An address, a name without a dot, and one under the top-level
-- domains localhost and internal, such as host.docker.internal, belong to no stranger.
local function is_our_host(authority)
  local host = authority:gsub(":%d*$", "")
  return not host:find(".", 1, true)
    or host:find("^%d+%.%d+%.%d+%.%d+$") ~= nil
    or host:find("^%[[%x:.]+%]$") ~= nil
    or host:find("%.localhost$") ~= nil
    or host:find("%.internal$") ~= nil
    or HOSTS[host]
end

-- Why the page that sends a request may not call, if so. A browser names the page's origin in every request that could
-- change something, and in every one to another origin that could read an answer. Programs call by any name.
local function check_page(headers)
  local authority, origin = (headers:get(":authority") or ""):lower(), headers:get("origin")
  if not ANY_HOST and not is_our_host(authority) and is_browser(headers) then
    return "pages of this host name may not call; GATEWAY_HOSTS lists those that may"
  end
  origin = not ANY_ORIGIN and origin and origin:lower()
  if origin and origin:match("^https?://(.+)$") ~= authority and not ORIGINS[origin] then
    return "pages of this origin may not call; GATEWAY_ALLOWED_ORIGINS lists those that may"
  end
end

local function is_open(headers)
  local path = (headers:get(":path") or ""):match("^[^?]*")
  return OPEN_PATHS[path] or path:find("^/playground/") or path:find("^/grpc%.health%.v1%.Health/")
end

local function close(handle, part)
  handle:streamInfo():dynamicMetadata():set(MANAGEMENT, part, true)
  handle:clearRouteCache()
end

-- Replaces a call's key by its client; the status and the message with which the call is refused otherwise.
local function check_key(handle, headers)
  if FILE ~= "" then
    read_again()
  end
  local key = key_of(headers)
  local client = client_of(handle, key)
  headers:remove("authorization")
  if headers:get("x-api-key") and not headers:get("anthropic-version") then
    -- Who has the key where Anthropic's clients have it gets the models in Anthropic's shape.
    headers:add("anthropic-version", "2023-06-01")
    handle:clearRouteCache()
  end
  headers:remove("x-api-key")
  if client == nil then
    if is_open(headers) then
      return nil, nil
    elseif FILE ~= "" and content == nil then
      return "503", "the transformer has not read the keys yet"
    end
    return "401", key and "this key is not known" or "a key is needed, as Authorization: Bearer or x-api-key"
  end
  headers:replace(CLIENT, client.name)
  headers:replace(POLICY, client.policy)
  if client.role ~= "admin" then
    close(handle, "settings")
  end
  if client.counts_tokens then
    close(handle, "tokens")
  end
  if (client.limit or client.per_second) and not is_open(headers) then
    if client.per_second and rate_limits.is_flood(handle, client) then
      return "429", client.name .. " has made more than twice the requests that its key allows in a second"
    elseif client.limit then
      rate_limits.mark(handle, client)
    end
  end
end

local callers = {}

-- The status and the message with which a call is refused for who sends it; nil for one that may call.
function callers.check(handle, headers)
  local is_refused = check_page(headers)
  if is_refused then
    return "403", is_refused
  end
  if NEEDS_KEY then
    return check_key(handle, headers)
  end
  if MANAGEMENT_IS_CLOSED and not handle:streamInfo():downstreamLocalAddress():find(MANAGEMENT_ADDRESS) then
    close(handle, "settings")
    close(handle, "log")
  end
end

return callers
