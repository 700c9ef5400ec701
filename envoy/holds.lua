-- What the calls of a worker hold, together and by caller: the client's name or, without keys, the address that Envoy has
-- seen and appended to those that the caller may have sent.
--
-- A call that is reset runs no code of ours: its handle, which is the stream, becomes garbage and leaves the weak table.
-- What it held is counted until then.

local FORGET_S = 600 -- Callers whose calls are dead.

-- The listeners have IPv4 alone; the pattern, which is not anchored, sees no more than an address.
local function caller_of(headers)
  return headers:get("x-headrace-client") or (headers:get("x-forwarded-for") or ""):sub(-15):match("[^,%s]*$")
end

return function()
  local hold_of_handle = setmetatable({}, { __mode = "k" })
  local held, held_by, collected_at = 0, {}, os.time() - 1
  local holds = {}

  local function add(caller, size)
    local own = (held_by[caller] or 0) + size
    held_by[caller] = own > 0 and own or nil
    held = held + size
  end

  -- Counts anew, and first looks for what is dead, at most once a second: it takes milliseconds of every call.
  local function count_again()
    collected_at = os.time()
    collectgarbage() -- What the first finds dead, among them handles, leaves the weak table at the second.
    collectgarbage()
    held, held_by = 0, {}
    for _, hold in pairs(hold_of_handle) do
      add(hold.caller, hold.size)
    end
  end

  local function fits(hold, size, most, most_of_caller)
    local more = size - hold.size
    return held + more <= most and (held_by[hold.caller] or 0) + more <= most_of_caller
  end

  -- The hold of a call, which is empty.
  function holds.begin(handle, headers)
    if os.time() - collected_at > FORGET_S then
      count_again()
    end
    hold_of_handle[handle] = { caller = caller_of(headers), size = 0 }
    return hold_of_handle[handle]
  end

  -- Whether a hold may be so large, among all and those of its caller; then it is.
  function holds.resize(hold, size, most, most_of_caller)
    if not fits(hold, size, most, most_of_caller) and os.time() ~= collected_at then
      count_again()
    end
    if not fits(hold, size, most, most_of_caller) then
      return false
    end
    add(hold.caller, size - hold.size)
    hold.size = size
    return true
  end

  function holds.finish(hold)
    holds.resize(hold, 0, math.huge, math.huge)
  end

  return holds
end
