-- The headers of every call, checked at the door, and what REST clients need besides transcoding.
--
-- Requests of every protocol: who may call is in callers.lua. What gRPC and the services parse out of headers is refused
-- here where they could not (400, INVALID_ARGUMENT), and so are more headers than they take (431, RESOURCE_EXHAUSTED).
-- Beyond that gRPC calls pass untouched.
-- Requests of REST: their bodies are bounded (bodies.lua). The service keeps the deadlines of the headers
-- x-timeout-ms and x-first-token-timeout-ms, so that it can say in the stream that one passed; the gRPC deadline, a
-- second after the first, ends a service that does not. A body that is compressed in a way that nobody behind the
-- gateway reads is refused, for it would be taken for what it is not.
-- A slash at the end of a path is removed, and HEAD becomes GET.
-- Answers: the service's x-http-status becomes the HTTP status, retry-after-ms also Retry-After, gRPC's
-- own headers go, a stream of lines says that it is one, and every error has its API's shape. Bodies are read of
-- errors alone, so that streams stay unbuffered.

local bodies = require("bodies")
local callers = require("callers")
local rate_limits = require("rate_limits")

local METADATA = "headrace.rest"
local FULL = "the gateway holds as many bytes of requests as it may"
local INTERNAL = {
  "grpc-status", "grpc-message", "grpc-status-details-bin", "grpc-encoding", "grpc-accept-encoding", "x-http-status",
}
local MAX_HEADERS_BYTES = 16384 -- Of names and values together; the services take four times as much (headrace/rpc/server/server.py).
local GRPC_STATUSES = { ["400"] = "3", ["401"] = "16", ["403"] = "7", ["429"] = "8", ["431"] = "8", ["501"] = "12", ["503"] = "14" }
local GRPC_ENCODINGS = { identity = true, gzip = true, deflate = true }
local TIMEOUTS = { "x-timeout-ms", "x-first-token-timeout-ms" }
-- Paths whose answers are lines of JSON.
local LINES = {
  ["/headrace/v1/generate"] = true, ["/headrace/v1/payloads"] = true, ["/headrace/v1/payloads:tail"] = true,
}
-- Paths beside /v1/ whose errors have OpenAI's shape.
local OPENAI_PATHS = {
  ["/health"] = true, ["/version"] = true, ["/tokenize"] = true, ["/detokenize"] = true, ["/tokenizer_info"] = true,
  ["/classify"] = true, ["/score"] = true, ["/rerank"] = true, ["/v2/rerank"] = true,
}
local OPENAI_TYPES = { ["401"] = "authentication_error", ["403"] = "permission_error", ["429"] = "rate_limit_error" }
local ANTHROPIC_TYPES = {
  ["400"] = "invalid_request_error", ["401"] = "authentication_error", ["403"] = "permission_error",
  ["404"] = "not_found_error", ["413"] = "request_too_large", ["429"] = "rate_limit_error",
  ["431"] = "request_too_large", ["503"] = "overloaded_error", ["504"] = "timeout_error",
}

local function remove_internal(fields)
  for _, name in ipairs(INTERNAL) do
    fields:remove(name)
  end
end

-- Bytes that are no UTF-8, which Envoy quotes from a body it cannot read, become question marks.
local function utf8(text)
  return (text:gsub("[\128-\255]+", function(bytes)
    return (bytes:gsub("([\192-\255]?)([\128-\191]*)", function(lead, rest)
      local first, second = lead:byte() or 0, rest:byte() or 0
      local wanted = first >= 240 and 3 or first >= 224 and 2 or 1
      local is_character = first >= 194 and first <= 244 and #rest == wanted
        and not (first == 224 and second < 160) and not (first == 237 and second > 159)
        and not (first == 240 and second < 144) and not (first == 244 and second > 143)
      return is_character and lead .. rest or string.rep("?", #lead + #rest)
    end))
  end))
end

local function json_string(text)
  return '"' .. text:gsub('[%c"\\]', function(c) return string.format("\\u%04x", c:byte()) end) .. '"'
end

local function error_body(api, status, message, request_id)
  if api == "anthropic" then
    local kind = ANTHROPIC_TYPES[status] or "api_error"
    return '{"type":"error","error":{"type":"' .. kind .. '","message":' .. message
      .. '},"request_id":' .. request_id .. "}"
  end
  if api ~= "openai" then
    return '{"error":' .. message .. "}"
  end
  local kind = OPENAI_TYPES[status] or status < "500" and "invalid_request_error" or "server_error"
  return '{"error":{"message":' .. message .. ',"type":"' .. kind .. '","code":null,"param":null}}'
end

-- Whether gRPC can decode the value of a header named "…-bin": base64, padded or not, without stray bits at its end.
local function is_base64(value)
  local digits, padding = value:match("^([%w+/]*)(=*)$")
  local rest = digits and #digits % 4
  return digits ~= nil
    and (rest == 0 and padding == ""
      or rest == 2 and (padding == "" or padding == "==") and digits:find("[AQgw]$") ~= nil
      or rest == 3 and (padding == "" or padding == "=") and digits:find("[AEIMQUYcgkosw048]$") ~= nil)
end

-- The status and the message with which a call is refused for its headers, and the gRPC headers among them. What is too
-- large is not looked at further: no pattern here or in callers.lua sees more bytes of a caller than this bound.
local function check_headers(headers)
  local size, status, message = 0, nil, nil
  local of_grpc = {}
  for name, value in pairs(headers) do -- To its end: Envoy takes no change of the headers before.
    size = size + #name + #value
    if name:byte(-1) == 110 and name:sub(-4) == "-bin" and size <= MAX_HEADERS_BYTES and not is_base64(value) then
      status, message = "400", name .. " is not base64"
    elseif name:sub(1, 5) == "grpc-" then
      of_grpc[#of_grpc + 1] = name
    end
  end
  if size > MAX_HEADERS_BYTES then
    return "431", string.format("the headers have %d bytes, at most %d are read", size, MAX_HEADERS_BYTES), of_grpc
  end
  for _, name in ipairs(TIMEOUTS) do
    local timeout = headers:get(name)
    -- Eight digits are the most that gRPC's header takes.
    if timeout and (#timeout > 8 or not timeout:find("^%d+$") or tonumber(timeout) == 0) then
      status, message = "400", name .. " is not a whole number from 1 to 99999999"
    end
  end
  return status, message, of_grpc
end

-- The same for the headers that gRPC's own callers alone send.
local function check_grpc_headers(headers)
  local timeout = headers:get("grpc-timeout")
  if timeout and (#timeout > 9 or not timeout:find("^%d+[HMSmun]$")) then
    return "400", "grpc-timeout is not 1 to 8 digits and a unit"
  end
  local attempts = headers:get("grpc-previous-rpc-attempts")
  if attempts and (#attempts > 8 or not attempts:find("^%d+$")) then
    return "400", "grpc-previous-rpc-attempts is not a whole number"
  end
  local encoding = headers:get("grpc-encoding")
  if encoding and not GRPC_ENCODINGS[encoding] then
    return "501", "messages are read in the encodings identity, gzip and deflate alone"
  end
end

-- As a whole gRPC answer, for by itself Envoy calls a 400 INTERNAL.
local function refuse_grpc(handle, status, message)
  handle:respond({
    [":status"] = "200",
    ["content-type"] = "application/grpc",
    ["grpc-status"] = GRPC_STATUSES[status],
    ["grpc-message"] = (message:gsub("%%", "%%25")),
    ["x-http-status"] = status,
    ["x-failed-hop"] = "gateway",
    ["retry-after-ms"] = status == "429" and "1000" or nil,
  })
end

-- A path with a slash at its end as without it, and HEAD as GET, of whose answer the body is dropped.
local function normalize(handle, headers)
  local path, query = headers:get(":path"):match("^([^?]*)(.*)$")
  local is_head = headers:get(":method") == "HEAD"
  if is_head then
    headers:replace(":method", "GET")
  end
  if #path > 1 and path:sub(-1) == "/" then
    path = path:sub(1, -2)
    headers:replace(":path", path .. query)
  elseif not is_head then
    return path, false
  end
  handle:clearRouteCache()
  return path, is_head
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local is_grpc = (headers:get("content-type") or ""):find("^application/grpc") ~= nil
  local path, is_head
  if not is_grpc then
    path, is_head = normalize(handle, headers)
  end
  local status, message, of_grpc = check_headers(headers)
  if status ~= "431" then
    local status_of_caller, message_of_caller = callers.check(handle, headers)
    status, message = status_of_caller or status, message_of_caller or message
  end
  if is_grpc then
    if status == nil and #of_grpc > 0 then
      status, message = check_grpc_headers(headers)
    end
    if status ~= nil then
      refuse_grpc(handle, status, message)
    end
    return
  end
  local is_openai = path:find("^/v1/") or path:find("^/openai/") or OPENAI_PATHS[path]
  local metadata = handle:streamInfo():dynamicMetadata()
  local is_anthropic = path == "/v1/messages" or path:find("^/v1/messages/")
    or headers:get("anthropic-version") and (path == "/v1/models" or path:find("^/v1/models/"))
  local request_id = headers:get("x-caller-request-id") or ""
  metadata:set(METADATA, "request_id", utf8(request_id ~= "" and request_id or headers:get("x-request-id") or ""))
  metadata:set(METADATA, "api", is_anthropic and "anthropic" or is_openai and "openai" or "v2")
  metadata:set(METADATA, "lines", LINES[path] or false)
  metadata:set(METADATA, "is_head", is_head)

  local coding = (headers:get("content-encoding") or "identity"):lower() -- The decompressor has removed `gzip`.
  if coding ~= "identity" and not (coding == "deflate" and path:find("^/v2/")) then
    handle:respond({ [":status"] = "400" }, "a body with this content-encoding is not read; gzip is")
    return
  end

  if status ~= nil then
    handle:respond({
      [":status"] = status,
      ["www-authenticate"] = status == "401" and "Bearer" or nil,
      ["retry-after-ms"] = status == "429" and "1000" or nil,
    }, message)
    return
  end
  for _, name in ipairs(of_grpc) do -- Theirs would be taken for those of the gRPC call that this becomes.
    headers:remove(name)
  end
  local timeout = headers:get("x-timeout-ms")
  if timeout then
    headers:replace("grpc-timeout", string.format("%dm", math.min(tonumber(timeout) + 1000, 99999999)))
  end

  if not bodies.pass(handle, headers) then
    handle:respond({ [":status"] = "429", ["retry-after-ms"] = "1000" }, FULL)
  end
end

function envoy_on_response(handle)
  rate_limits.rename(handle)
  local rest = handle:streamInfo():dynamicMetadata():get(METADATA)
  if rest == nil then
    return
  end
  local is_refused = bodies.answered(rest)
  local headers = handle:headers()
  local chosen = headers:get("x-http-status")
  remove_internal(headers)
  if is_refused then -- By its route, or by the transcoder or a service, which miss what was dropped.
    chosen = "429"
    headers:replace("retry-after-ms", "1000")
    headers:replace("x-failed-hop", "gateway")
  end
  local retry_after_ms = tonumber(headers:get("retry-after-ms") or "")
  if retry_after_ms then
    headers:replace("retry-after", string.format("%d", math.ceil(retry_after_ms / 1000)))
  end
  if chosen and chosen:find("^[2-5]%d%d$") then
    headers:replace(":status", chosen)
  end

  if rest["api"] == "anthropic" then
    headers:replace("request-id", rest["request_id"]) -- Where Anthropic's clients look for it.
  end

  local status = headers:get(":status")
  if rest["is_head"] then
    for chunk in handle:bodyChunks() do
      chunk:setBytes("")
    end
    return
  end
  if tonumber(status) < 400 then
    if rest["lines"] then
      headers:replace("content-type", "application/x-ndjson")
    end
    if handle:streamInfo():protocol() == "HTTP/2" then -- HTTP/1.1 clients get no trailers.
      for _ in handle:bodyChunks() do -- Each chunk has gone on when the next is awaited.
      end
      local trailers = handle:trailers()
      if trailers then
        remove_internal(trailers)
      end
    end
    return
  end
  local by_envoy = headers:get("content-type") == "text/plain"
  local body = handle:body(true)
  local text = body:getBytes(0, body:length())
  -- The transcoder's google.rpc.Status, whose message is escaped already.
  local message = is_refused and json_string(FULL)
    or text:match('^{"code":%d+,"message":(".*")}$')
    or text:match('^{"code":%d+,"message":(".-"),"details":')
  if message == nil then
    if not by_envoy then
      return -- The service wrote its API's body itself.
    end
    message = json_string(text)
  end
  if status == "429" and message:find("message larger than max", 1, true) then -- gRPC's own refusal, which is unsigned.
    status, message = "413", '"the request is larger than 64 MiB"'
  end
  local length = body:setBytes(error_body(rest["api"], status, utf8(message), json_string(rest["request_id"])))
  headers = handle:headers() -- The earlier reference died while the body was read.
  headers:replace(":status", status)
  headers:replace("content-length", tostring(length))
  headers:replace("content-type", "application/json")
  if not headers:get("x-failed-hop") then -- Envoy signs its own, so this is who spoke.
    headers:add("x-failed-hop", "transformer")
  end
end
