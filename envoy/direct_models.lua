-- The models that need neither text nor a processor, whose ModelInfer calls go straight to a predictor.
--
-- The transformer keeps the list of these models in a file, a name a line (services/transformer/headrace_transformer/routing/direct_models.py),
-- which is read again once a second. The model's name is read out of the first bytes of the message, so that no message
-- is held until it is whole: clients write `model_name`, the message's first field, first. A message that begins in
-- another way is not found to ask one of them, nor is a compressed one: the transformer takes it.

local watched_file = require("watched_file")

local MAX_NAME_BYTES = 127 -- Longer ones have a length of two bytes.
local MODEL_NAME = 0x0A -- Field 1, a string (headrace_protos/inference.proto).
local FRAME_BYTES = 5 -- gRPC's own before a message: whether it is compressed, and its length.

local listed_models = watched_file(os.getenv("DIRECT_MODELS"))
local is_direct = {}

-- The name that a message begins with; nil where it does not, or not all of it has come.
local function model_name(bytes)
  local head = bytes:getBytes(0, math.min(bytes:length(), FRAME_BYTES + 2 + MAX_NAME_BYTES))
  local compressed, field, size = head:byte(1), head:byte(FRAME_BYTES + 1, FRAME_BYTES + 2)
  if compressed ~= 0 or field ~= MODEL_NAME or not size or size > MAX_NAME_BYTES or #head < FRAME_BYTES + 2 + size then
    return nil
  end
  return head:sub(FRAME_BYTES + 3, FRAME_BYTES + 2 + size)
end

local direct_models = {}

-- Whether there are any.
function direct_models.exist()
  local text, has_changed = listed_models()
  if has_changed then
    is_direct = {}
    for name in (text or ""):gmatch("[^\n]+") do
      is_direct[name] = true
    end
  end
  return next(is_direct) ~= nil
end

-- Whether a message that begins with these bytes is for one of them.
function direct_models.is_asked(bytes)
  local name = model_name(bytes)
  return name ~= nil and is_direct[name] == true
end

return direct_models
