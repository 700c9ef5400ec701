-- What the transcoder leaves undone for REST clients; gRPC calls pass untouched.
--
-- Requests: the service keeps the deadlines of the headers x-timeout-ms and x-first-token-timeout-ms, so that it can say
-- in the stream that one passed; the gRPC deadline, a second after the first, ends a service that does not. A body that is compressed in a way that
-- nobody behind the gateway reads is refused, for it would be taken for what it is not.
-- Answers: the service's x-http-status becomes the HTTP status, retry-after-ms also Retry-After, gRPC's
-- own headers go, a stream of lines says that it is one, and every error has its API's shape. Bodies are read of
-- errors alone, so that streams stay unbuffered.

local METADATA = "millrace.rest"
local INTERNAL = {
  "grpc-status",
  "grpc-message",
  "grpc-status-details-bin",
  "grpc-encoding",
  "grpc-accept-encoding",
  "x-http-status",
}
local TIMEOUTS = { "x-timeout-ms", "x-first-token-timeout-ms" }
-- Paths whose answers are lines of JSON.
local LINES = {
  ["/millrace/v1/generate"] = true,
  ["/millrace/v1/payloads"] = true,
  ["/millrace/v1/payloads:tail"] = true,
}
local OPENAI_TYPES = {
  ["400"] = "invalid_request_error",
  ["401"] = "authentication_error",
  ["403"] = "permission_error",
  ["404"] = "invalid_request_error",
  ["413"] = "invalid_request_error",
  ["429"] = "rate_limit_error",
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

local function error_body(api, status, message)
  if api ~= "openai" then
    return '{"error":' .. message .. "}"
  end
  local kind = OPENAI_TYPES[status] or "server_error"
  return '{"error":{"message":' .. message .. ',"type":"' .. kind .. '","code":null,"param":null}}'
end

function envoy_on_request(handle)
  local headers = handle:headers()
  if (headers:get("content-type") or ""):find("^application/grpc") then
    return
  end
  local path = headers:get(":path")
  local is_openai = path:find("^/v1/") or path:find("^/openai/")
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set(METADATA, "api", is_openai and "openai" or "v2")
  metadata:set(METADATA, "lines", LINES[path:match("^[^?]*")] or false)

  local coding = (headers:get("content-encoding") or "identity"):lower()
  if coding ~= "identity" and coding ~= "gzip" and not (coding == "deflate" and path:find("^/v2/")) then
    handle:respond({ [":status"] = "400" }, "a body with this content-encoding is not read; gzip is")
    return
  end

  headers:remove("grpc-timeout")
  for _, name in ipairs(TIMEOUTS) do
    local timeout = headers:get(name)
    -- Eight digits are the most that gRPC's header takes.
    if timeout and (#timeout > 8 or not timeout:find("^%d+$") or tonumber(timeout) == 0) then
      handle:respond({ [":status"] = "400" }, name .. " is not a whole number from 1 to 99999999")
      return
    end
  end
  local timeout = headers:get("x-timeout-ms")
  if timeout then
    headers:replace("grpc-timeout", string.format("%dm", math.min(tonumber(timeout) + 1000, 99999999)))
  end
end

function envoy_on_response(handle)
  local rest = handle:streamInfo():dynamicMetadata():get(METADATA)
  if rest == nil then
    return
  end
  local headers = handle:headers()
  local chosen = headers:get("x-http-status")
  remove_internal(headers)
  local retry_after_ms = tonumber(headers:get("retry-after-ms") or "")
  if retry_after_ms then
    headers:replace("retry-after", string.format("%d", math.ceil(retry_after_ms / 1000)))
  end
  if chosen and chosen:find("^[2-5]%d%d$") then
    headers:replace(":status", chosen)
  end

  local status = headers:get(":status")
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
  local message = text:match('^{"code":%d+,"message":(".*")}$')
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
  local length = body:setBytes(error_body(rest["api"], status, utf8(message)))
  headers = handle:headers() -- The earlier reference died while the body was read.
  headers:replace(":status", status)
  headers:replace("content-length", tostring(length))
  headers:replace("content-type", "application/json")
  if not headers:get("x-failed-hop") then -- Envoy signs its own, so this is who spoke.
    headers:add("x-failed-hop", "transformer")
  end
end
