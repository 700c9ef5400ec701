-- Calls of gRPC whose first message has yet to come: the gateway holds them, so that a call that asks nothing costs no
-- service anything; it answers streams that end without one, and marks calls that go straight to a predictor.
--
-- The next filter holds the headers of a call until the first bytes of its message have come. Each worker holds MAX calls
-- at most, MAX_OF_CALLER of one caller; a call takes 35 KB. What is beyond goes on to its service, which ends those of the
-- caller that have been idle for longest (headrace/rpc/limits/idle_calls.py): so the many calls of one user refuse none of another's
-- behind the same proxy.

local caller_of = require("caller")
local direct_models = require("direct_models")

local METADATA = "headrace.first_message"
local MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
-- Methods that take any number of messages, none among them.
local STREAMS = {
  ["/inference.GRPCInferenceService/ModelStreamInfer"] = true,
  ["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"] = true,
  ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"] = true,
}
local MAX = tonumber(os.getenv("HELD_CALLS") or "4096")
local MAX_OF_CALLER = MAX * 3 / 4

-- The caller of each call that is held, by its handle, which is the stream. A call that is reset runs no code of ours: its
-- handle leaves the table as garbage, and is counted until then.
local caller_of_call = setmetatable({}, { __mode = "k" })
local calls_of_caller, calls = {}, 0
local counted_at = 0 -- In whole seconds.

-- Counts anew, at most once a second: it takes milliseconds of every call.
local function count_again()
  if os.time() == counted_at then
    return
  end
  counted_at = os.time()
  collectgarbage() -- What the first finds dead, among them handles, leaves the weak table at the second.
  collectgarbage()
  calls_of_caller, calls = {}, 0
  for _, caller in pairs(caller_of_call) do
    calls_of_caller[caller] = (calls_of_caller[caller] or 0) + 1
    calls = calls + 1
  end
end

-- Whether the call is held.
local function begin(handle, headers)
  if calls >= MAX_OF_CALLER then
    count_again()
  end
  local caller = caller_of(headers)
  local own = calls_of_caller[caller] or 0
  if calls >= MAX or own >= MAX_OF_CALLER then
    return false
  end
  caller_of_call[handle] = caller
  calls_of_caller[caller] = own + 1
  calls = calls + 1
  return true
end

local function finish(handle)
  local caller = caller_of_call[handle]
  caller_of_call[handle] = nil
  local own = calls_of_caller[caller] - 1
  calls_of_caller[caller] = own > 0 and own or nil
  calls = calls - 1
end

-- Sets metadata that the routes match.
local function mark(handle, name)
  handle:streamInfo():dynamicMetadata():set(METADATA, name, true)
  handle:clearRouteCache()
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local path = headers:get(":path")
  if not begin(handle, headers) then
    mark(handle, "is_not_held")
    return
  end
  local may_be_direct = path == MODEL_INFER and direct_models.exist()
  local is_empty = true
  for bytes in handle:bodyChunks() do
    if bytes:length() > 0 then -- A frame without bytes ends the call, or says nothing.
      is_empty = false
      if may_be_direct and direct_models.is_asked(bytes) then
        mark(handle, "is_direct")
      end
      break
    end
  end
  finish(handle)
  if is_empty and STREAMS[path] then
    mark(handle, "is_empty")
  end
end
