-- The bytes of REST bodies that a worker of Envoy holds: the transcoder, or the filter `buffer`, holds a body until its
-- last byte has come.
--
-- What has come counts, not what is announced. All bodies have a bound, and a caller has half of it. A quarter is for small
-- bodies alone; a tiny one of a known length is not counted. A body that would exceed a bound is refused before its first
-- byte where its length says so, else when it does: the rest of it is dropped as it comes, and the route that its mark
-- selects answers at its end. One that comes too slowly gets a route whose longest duration has passed.

local holds = require("holds")()
local mark = require("mark")

local METADATA = "headrace.rest"
local BYTES = tonumber(os.getenv("REST_BODIES_MIB") or "512") * 1048576
local MAX_BODY_BYTES = 62914560 -- The transcoder's max_request_body_size.
local SMALL_BYTES, TINY_BYTES = 65536, 8192
local GRACE_MS, BYTES_PER_MS = tonumber(os.getenv("REST_BODIES_GRACE_S") or "30") * 1000, 0.5
local WITHOUT_BODY = { GET = true, HEAD = true, OPTIONS = true, DELETE = true }

local hold_of_call = setmetatable({}, { __mode = "v" })

local function fits(hold, size)
  local bound = size > SMALL_BYTES and BYTES * 3 / 4 or BYTES
  return holds.resize(hold, size, bound, math.max(bound / 2, MAX_BODY_BYTES))
end

-- Selects another route for a request whose body has begun to come.
local function select_route(handle, name)
  mark(handle, METADATA, name)
  handle:metadata() -- Looks for the route.
end

local bodies = {}

-- Watches the body of a request as it comes, and counts it unless it is tiny; false where it is refused before.
function bodies.pass(handle, headers)
  local length = tonumber(headers:get("content-length") or "")
  if length == nil and WITHOUT_BODY[headers:get(":method")] and not headers:get("transfer-encoding") then
    return true
  end
  local hold
  if length == nil or length > TINY_BYTES then
    hold = holds.begin(handle, headers)
    if not fits(hold, math.max(math.min(length or 1, MAX_BODY_BYTES), 1)) then
      return false
    end
    holds.finish(hold) -- Nothing has come yet.
    local call = headers:get("x-headrace-call-id")
    handle:streamInfo():dynamicMetadata():set(METADATA, "call", call)
    hold_of_call[call] = hold
  end
  local came, is_refused, is_slow = 0, false, false
  local graced_until = handle:timestamp(EnvoyTimestampResolution.MILLISECOND) + GRACE_MS
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    came = came + size
    if not is_slow and came < BYTES_PER_MS * (handle:timestamp(EnvoyTimestampResolution.MILLISECOND) - graced_until) then
      is_slow = true
      select_route(handle, "is_slow")
    end
    if hold and size > 0 and (is_refused or not fits(hold, came)) then
      chunk:setBytes("")
      if not is_refused then
        is_refused = true
        select_route(handle, "is_refused")
      end
    end
  end
  return true
end
jit.off(bodies.pass) -- The compiled loop would keep the iterators that it has met, and so their handles.

-- The answer begins, and the request's bytes are held no longer; whether it was refused. `metadata` is METADATA.
function bodies.answered(metadata)
  local hold = hold_of_call[metadata["call"] or ""]
  if hold then
    holds.finish(hold)
  end
  return metadata["is_refused"] == true
end

return bodies
