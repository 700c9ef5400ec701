-- A file that another process replaces as a whole; read again when a call asks for it, at most once a second.

-- A function that returns what `parse` makes of the file's text; nil while there is no file.
return function(path, parse)
  local read_at, text, value = 0, nil, nil
  return function()
    if os.time() ~= read_at then
      read_at = os.time()
      local file, before = path and io.open(path), text
      text = file and file:read("*a")
      if file then
        file:close()
      end
      if text ~= before then
        value = text and parse(text)
      end
    end
    return value
  end
end
