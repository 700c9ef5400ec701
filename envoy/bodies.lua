-- The bytes of REST bodies that a worker of Envoy holds: the transcoder, or the filter `buffer`, holds a body until its
-- last byte has come.
--
-- What has come counts, not what is announced. All bodies have a bound, and a caller (caller.lua) has half of it. A quarter
-- is for small bodies alone; a tiny one of a known length is not counted. A body that would exceed a bound is refused
-- before its first byte where its length says so, else when it does: the rest of it is dropped as it comes, and the route
-- that its mark selects answers at its end. One that comes too slowly gets a route whose longest duration has passed.

local caller_of = require("caller")

local METADATA = "headrace.rest"
local BYTES = tonumber(os.getenv("REST_BODIES_MIB") or "512") * 1048576
local MAX_BODY_BYTES = 62914560 -- The transcoder's max_request_body_size.
local SMALL_BYTES, TINY_BYTES = 65536, 8192
local GRACE_MS, BYTES_PER_MS = tonumber(os.getenv("REST_BODIES_GRACE_S") or "30") * 1000, 0.5
local WITHOUT_BODY = { GET = true, HEAD = true, OPTIONS = true, DELETE = true }

local held, held_of = 0, {} -- Bytes, together and by caller.
local collected_at = 0 -- When what is dead was last looked for, in whole seconds.
-- A hold lasts until its answer begins, or as long as the request's handle, which is the stream: one that is reset runs
-- no code of ours, so a finalizer gives its bytes back.
local hold_of_handle = setmetatable({}, { __mode = "k" })
local hold_of_call = setmetatable({}, { __mode = "v" })

local function settle(hold, size)
  local own = (held_of[hold.caller] or 0) - hold.size + size
  held_of[hold.caller] = own > 0 and own or nil
  held = held - hold.size + size
  hold.size = size
end

-- Whether a hold may become so large.
local function fits(hold, size)
  local bound = size > SMALL_BYTES and BYTES * 3 / 4 or BYTES
  local own = (held_of[hold.caller] or 0) - hold.size + size
  return held - hold.size + size <= bound and own <= math.max(bound / 2, MAX_BODY_BYTES)
end

local function collected(hold, size)
  if not fits(hold, size) and os.time() ~= collected_at then -- Once a second: it takes milliseconds of every call.
    collected_at = os.time()
    collectgarbage() -- What the first finds dead, among them handles, leaves the weak tables at the second.
    collectgarbage()
  end
  return fits(hold, size)
end

local bodies = {}

-- Selects another route for a request whose body has begun to come.
local function mark(handle, name)
  handle:streamInfo():dynamicMetadata():set(METADATA, name, true) -- An earlier reference is dead.
  handle:clearRouteCache()
  handle:metadata() -- Looks for the route.
end

-- Watches the body of a request as it comes, and counts it unless it is tiny; false where it is refused before.
function bodies.pass(handle, headers)
  local length = tonumber(headers:get("content-length") or "")
  if length == nil and WITHOUT_BODY[headers:get(":method")] and not headers:get("transfer-encoding") then
    return true
  end
  local hold
  if length == nil or length > TINY_BYTES then
    hold = { size = 0, caller = caller_of(headers), finalizer = newproxy(true) }
    if not collected(hold, math.max(math.min(length or 1, MAX_BODY_BYTES), 1)) then
      return false
    end
    getmetatable(hold.finalizer).__gc = function()
      settle(hold, 0)
    end
    local call = headers:get("x-headrace-call-id")
    handle:streamInfo():dynamicMetadata():set(METADATA, "call", call)
    hold_of_handle[handle] = hold
    hold_of_call[call] = hold
  end
  local came, is_refused, is_slow = 0, false, false
  local graced_until = handle:timestamp(EnvoyTimestampResolution.MILLISECOND) + GRACE_MS
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    came = came + size
    if not is_slow and came < BYTES_PER_MS * (handle:timestamp(EnvoyTimestampResolution.MILLISECOND) - graced_until) then
      is_slow = true
      mark(handle, "is_slow")
    end
    if hold and not is_refused and collected(hold, came) then
      settle(hold, came)
    elseif hold and size > 0 then
      chunk:setBytes("")
      if not is_refused then
        is_refused = true
        mark(handle, "is_refused")
      end
    end
  end
  return true
end
jit.off(bodies.pass) -- The compiled loop would keep the iterators that it has met, and so their handles.

-- The answer begins: gives the bytes of its request back; whether that was refused. `metadata` is METADATA.
function bodies.answered(metadata)
  local hold = metadata["call"] and hold_of_call[metadata["call"]]
  if hold then
    settle(hold, 0)
  end
  return metadata["is_refused"] == true
end

return bodies
