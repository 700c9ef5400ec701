-- A file that another process replaces as a whole; read again when a call asks for it, at most once a second.

-- A function that returns the file's text, nil while there is none, and whether it has changed since it was last called.
return function(path)
  local read_at, text = 0, nil -- In whole seconds.
  return function()
    local now = os.time()
    if now == read_at then
      return text, false
    end
    read_at = now
    local file = path and io.open(path)
    local before = text
    text = file and file:read("*a")
    if file then
      file:close()
    end
    return text, text ~= before
  end
end
