-- The headers of every call, checked at the door, and what REST clients need besides transcoding.
--
-- Requests: what gRPC and the services parse out of headers is refused here where they could not (400), and so are more headers
-- than they take (431); calls of gRPC pass untouched beyond that. The service keeps the deadline of x-timeout-ms, so that it
-- can say in the stream that it passed; the gRPC deadline, a second later, ends a service that does not.
-- Answers of REST: the service's x-http-status becomes the HTTP status, and an error has its API's shape. The bodies of errors
-- alone are read, so that streams stay unbuffered.

local bodies = require("bodies")
local check_caller = require("callers")

local METADATA = "headrace.rest"
local FULL = "the gateway holds as many bytes of requests as it may"
local GRPC_ANSWER = {
  "grpc-status", "grpc-message", "grpc-status-details-bin", "grpc-encoding", "grpc-accept-encoding", "x-http-status",
}
-- Of a REST client they would be taken for those of the gRPC call that its request becomes.
local GRPC_REQUEST = { "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "grpc-previous-rpc-attempts" }
local GRPC_STATUSES = { ["400"] = "3", ["401"] = "16", ["403"] = "7", ["429"] = "8", ["431"] = "8", ["501"] = "12", ["503"] = "14" }
local GRPC_ENCODINGS = { identity = true, gzip = true, deflate = true }
local MAX_HEADERS_BYTES = 16384 -- Of names and values together; the services take four times as much (headrace/rpc/server/server.py).
-- Headers that gRPC or a service parses: the pattern of a value, its most bytes, and what another is not.
local MILLISECONDS = { "^0*[1-9]%d*$", 8, "a whole number from 1 to 99999999" } -- gRPC's own header takes no more digits.
local PARSED = {
  ["x-timeout-ms"] = MILLISECONDS,
  ["x-first-token-timeout-ms"] = MILLISECONDS,
  ["grpc-timeout"] = { "^%d+[HMSmun]$", 9, "1 to 8 digits and a unit" },
  ["grpc-previous-rpc-attempts"] = { "^%d+$", 8, "a whole number" },
}
-- What follows a model's name and version in paths of the V2 API.
local ACTIONS = {
  ["/ready"] = true, ["/config"] = true, ["/stats"] = true, ["/infer"] = true, ["/generate"] = true,
  ["/generate_stream"] = true, ["/load"] = true, ["/unload"] = true, ["/trace/setting"] = true,
}
local OPENAI_TYPES = { ["401"] = "authentication_error", ["403"] = "permission_error", ["429"] = "rate_limit_error" }
local ANTHROPIC_TYPES = {
  ["400"] = "invalid_request_error", ["401"] = "authentication_error", ["403"] = "permission_error",
  ["404"] = "not_found_error", ["413"] = "request_too_large", ["429"] = "rate_limit_error",
  ["431"] = "request_too_large", ["503"] = "overloaded_error", ["504"] = "timeout_error",
}

local function remove(fields, names)
  for _, name in ipairs(names) do
    fields:remove(name)
  end
end

-- Whether gRPC can decode the value of a header named "…-bin": base64, padded or not, without stray bits at its end.
local function is_base64(value)
  local digits, padding = value:match("^([%w+/]*)(=*)$")
  local rest = digits and #digits % 4
  return rest == 0 and padding == ""
    or rest == 2 and (padding == "" or padding == "==") and digits:find("[AQgw]$") ~= nil
    or rest == 3 and (padding == "" or padding == "=") and digits:find("[AEIMQUYcgkosw048]$") ~= nil
end

-- The status and the message with which a call is refused for its headers. What is too large is not looked at further: no
-- pattern here or in callers.lua sees more bytes of a caller than this bound.
local function check_headers(headers)
  local size, status, message = 0, nil, nil
  for name, value in pairs(headers) do -- To its end: Envoy takes no change of the headers before.
    size = size + #name + #value
    if name:byte(-1) == 110 and name:sub(-4) == "-bin" and size <= MAX_HEADERS_BYTES and not is_base64(value) then
      status, message = "400", name .. " is not base64"
    end
  end
  if size > MAX_HEADERS_BYTES then
    return "431", string.format("the headers have %d bytes, at most %d are read", size, MAX_HEADERS_BYTES)
  end
  for name, form in pairs(PARSED) do
    local value = headers:get(name)
    if value and (#value > form[2] or not value:find(form[1])) then
      status, message = "400", name .. " is not " .. form[3]
    end
  end
  if not GRPC_ENCODINGS[headers:get("grpc-encoding") or "identity"] then
    return "501", "messages are read in the encodings identity, gzip and deflate alone"
  end
  return status, message
end

-- Of gRPC the whole answer, for Envoy's own has other statuses.
local function refuse(handle, is_grpc, status, message)
  local answer = {
    [":status"] = status,
    ["www-authenticate"] = status == "401" and "Bearer" or nil,
    ["retry-after-ms"] = status == "429" and "1000" or nil,
  }
  if is_grpc then
    answer[":status"], answer["content-type"], answer["x-failed-hop"] = "200", "application/grpc", "gateway"
    answer["grpc-status"], answer["x-http-status"] = GRPC_STATUSES[status], status
    answer["grpc-message"], message = message:gsub("%%", "%%25"), nil
  end
  handle:respond(answer, message)
end

-- A path with `%2F` for the slashes in a model's name, which routes and transcoder take as one part. In the V2 API the name
-- ends before a version and an action.
local function join_name(path)
  local head, name = path:match("^(/[%w/]-/models/)(.+)$")
  if head == nil then
    return path
  end
  local rest = ""
  if head:find("^/v2/") then
    local before, action = name:match("^(.+)(/trace/setting)$")
    if before == nil then
      before, action = name:match("^(.+)(/[%l_]+)$")
    end
    if ACTIONS[action] then
      name, rest = before, action
    end
    local model, version = name:match("^(.+)(/versions/[^/]+)$")
    if model then
      name, rest = model, version .. rest
    end
  end
  return head .. name:gsub("/", "%%2F") .. rest
end

-- A path with a slash at its end as without it, and HEAD as GET, of whose answer the body is dropped.
local function normalize(handle, headers)
  local given, query = headers:get(":path"):match("^([^?]*)(.*)$")
  local is_head, path = headers:get(":method") == "HEAD", join_name(given:match("^(.+)/$") or given)
  if is_head then
    headers:replace(":method", "GET")
  end
  if path ~= given then
    headers:replace(":path", path .. query)
  end
  if is_head or path ~= given then
    handle:clearRouteCache()
  end
  return path, is_head
end

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get(":path") == nil then -- CONNECT has none.
    handle:respond({ [":status"] = "404" }, '{"error":"unknown path or method"}')
    return
  end
  local is_grpc = (headers:get("content-type") or ""):find("^application/grpc") ~= nil
  local path, is_head
  if not is_grpc then
    path, is_head = normalize(handle, headers)
    remove(headers, GRPC_REQUEST)
  end
  local status, message = check_headers(headers)
  if status ~= "431" then
    local status_of_caller, message_of_caller = check_caller(handle, headers)
    status, message = status_of_caller or status, message_of_caller or message
  end
  if not is_grpc then
    local request_id = headers:get("x-caller-request-id") or ""
    local metadata = handle:streamInfo():dynamicMetadata()
    metadata:set(METADATA, "request_id", request_id ~= "" and request_id or headers:get("x-request-id") or "")
    metadata:set(METADATA, "is_head", is_head)
    -- Of the route that the call began with; who has the key where Anthropic's clients have it has got their header since.
    local is_anthropic = headers:get("anthropic-version") and (path == "/v1/models" or path:find("^/v1/models/"))
    metadata:set(METADATA, "api", is_anthropic and "anthropic" or handle:filterContext():get("api"))
    local coding = (headers:get("content-encoding") or "identity"):lower() -- The decompressor has removed `gzip`.
    if status == nil and coding ~= "identity" and not (coding == "deflate" and path:find("^/v2/")) then
      status, message = "400", "a body with this content-encoding is not read; gzip is"
    end
  end
  if status ~= nil then
    refuse(handle, is_grpc, status, message)
  elseif not is_grpc then
    local timeout = headers:get("x-timeout-ms")
    if timeout then
      headers:replace("grpc-timeout", string.format("%dm", math.min(tonumber(timeout) + 1000, 99999999)))
    end
    if not bodies.pass(handle, headers) then
      refuse(handle, is_grpc, "429", FULL)
    end
  end
end

-- What the rate limit service counts, in the headers of OpenAI's API instead of those of Envoy's filter ("600, 600;w=60"
-- and seconds); it replaces what the process that answered counts of its own (headrace/rpc/limits/client_limits.py).
local function rename_limits(headers)
  local limit = (headers:get("x-ratelimit-limit") or ""):match("^%d+")
  if limit == nil then
    return
  end
  local reset_s = tonumber(headers:get("x-ratelimit-reset")) or 0
  local minutes = reset_s < 60 and "" or math.floor(reset_s / 60) .. "m"
  headers:replace("x-ratelimit-limit-requests", limit)
  headers:replace("x-ratelimit-remaining-requests", headers:get("x-ratelimit-remaining") or "0")
  headers:replace("x-ratelimit-reset-requests", minutes .. reset_s % 60 .. "s")
  if headers:get("x-envoy-ratelimited") then
    headers:replace("retry-after-ms", string.format("%d", math.max(reset_s, 1) * 1000))
  end
  remove(headers, { "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "x-envoy-ratelimited" })
end

-- Text that Envoy quotes from a body that it cannot read may be no UTF-8.
local function json_string(text)
  text = text:gsub("[\128-\255]", "?")
  return '"' .. text:gsub('[%c"\\]', function(c) return string.format("\\u%04x", c:byte()) end) .. '"'
end

-- `message` is JSON.
local function error_body(api, status, message, request_id)
  if api == "anthropic" then
    return string.format(
      '{"type":"error","error":{"type":"%s","message":%s},"request_id":%s}',
      ANTHROPIC_TYPES[status] or "api_error", message, json_string(request_id)
    )
  elseif api == "openai" then
    local kind = OPENAI_TYPES[status] or status < "500" and "invalid_request_error" or "server_error"
    return string.format('{"error":{"message":%s,"type":"%s","code":null,"param":null}}', message, kind)
  end
  return string.format('{"error":%s}', message)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  rename_limits(headers)
  local rest = handle:streamInfo():dynamicMetadata():get(METADATA)
  if rest == nil then
    return
  end
  local is_refused = bodies.answered(rest)
  local status = (headers:get("x-http-status") or ""):match("^[2-5]%d%d$") or headers:get(":status")
  remove(headers, GRPC_ANSWER)
  if is_refused then -- By its route, or by the transcoder or a service, which miss what was dropped.
    status = "429"
    headers:replace("retry-after-ms", "1000")
    headers:replace("x-failed-hop", "gateway")
  end
  headers:replace(":status", status)
  local retry_after_ms = tonumber(headers:get("retry-after-ms") or "")
  if retry_after_ms then
    headers:replace("retry-after", string.format("%d", math.ceil(retry_after_ms / 1000)))
  end
  if rest["api"] == "anthropic" then
    headers:replace("request-id", rest["request_id"]) -- Where Anthropic's clients look for it.
  end

  if rest["is_head"] then
    for chunk in handle:bodyChunks() do
      chunk:setBytes("")
    end
  elseif tonumber(status) < 400 then
    if handle:filterContext():get("has_lines") then
      headers:replace("content-type", "application/x-ndjson")
    end
    if handle:streamInfo():protocol() == "HTTP/2" then -- HTTP/1.1 clients get no trailers.
      for _ in handle:bodyChunks() do -- Each chunk has gone on when the next is awaited.
      end
      local trailers = handle:trailers()
      if trailers then
        remove(trailers, GRPC_ANSWER)
      end
    end
  else
    local is_by_envoy = headers:get("content-type") == "text/plain"
    local body = handle:body(true)
    local text = is_refused and FULL or body:getBytes(0, body:length())
    -- The transcoder's google.rpc.Status, whose message is escaped already.
    local message = text:match('^{"code":%d+,"message":(".*")}$')
      or text:match('^{"code":%d+,"message":(".-"),"details":')
      or (is_by_envoy or is_refused) and json_string(text)
    if not message then
      return -- The service wrote its API's body itself.
    elseif status == "429" and message:find("message larger than max", 1, true) then -- gRPC's own refusal, unsigned.
      status, message = "413", '"the request is larger than 64 MiB"'
    end
    local length = body:setBytes(error_body(rest["api"], status, message, rest["request_id"]))
    headers = handle:headers() -- The earlier reference died while the body was read.
    headers:replace(":status", status)
    headers:replace("content-length", tostring(length))
    headers:replace("content-type", "application/json")
    if not headers:get("x-failed-hop") then -- Envoy signs its own, so this is who spoke.
      headers:add("x-failed-hop", "transformer")
    end
  end
end
