-- Calls of gRPC whose first message has yet to come: the gateway holds them, so that a call that asks nothing costs no
-- service anything; it answers streams that end without one, and marks the ModelInfer calls that go straight to a predictor:
-- those of models that need neither text nor a processor.
--
-- The next filter holds the headers of a call until the first bytes of its message have come. Each worker holds MAX calls
-- at most, MAX_OF_CALLER of one caller; a call takes 35 KB. What is beyond goes on to its service, which ends those of the
-- caller that have been idle for longest (headrace/rpc/limits/idle_calls.py).

local holds = require("holds")()
local mark = require("mark")
local watched_file = require("watched_file")

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
local MAX_NAME_BYTES = 127 -- Longer ones have a length of two bytes.

-- The transformer keeps the list, a name a line (services/transformer/headrace_transformer/routing/gateway_files.py).
local direct_models = watched_file(os.getenv("DIRECT_MODELS"), function(text)
  local names = {}
  for name in text:gmatch("[^\n]+") do
    names[name] = true
  end
  return names
end)

-- The model's name in the first bytes of a message, so that none is held until it is whole: clients write the message's
-- first field first, a string (10). nil where the message is compressed, begins otherwise, or the name has not come.
local function model_name(bytes)
  local head = bytes:getBytes(0, math.min(bytes:length(), 7 + MAX_NAME_BYTES))
  local size = head:match("^%z....\10([%z\1-\127])") -- gRPC's frame is a flag and four bytes of length.
  local name = size and head:sub(8, 7 + size:byte())
  return name and #name == size:byte() and name
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local path = headers:get(":path")
  local hold = holds.begin(handle, headers)
  if not holds.resize(hold, 1, MAX, MAX_OF_CALLER) then
    mark(handle, METADATA, "is_not_held")
    return
  end
  local models = path == MODEL_INFER and direct_models()
  local is_empty = true
  for bytes in handle:bodyChunks() do
    if bytes:length() > 0 then -- A frame without bytes ends the call, or says nothing.
      is_empty = false
      if models and models[model_name(bytes) or ""] then
        mark(handle, METADATA, "is_direct")
      end
      break
    end
  end
  holds.finish(hold)
  if is_empty and STREAMS[path] then
    mark(handle, METADATA, "is_empty")
  end
end
