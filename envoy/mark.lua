-- Marks a call for the routes, which are looked for anew.
return function(handle, filter, name)
  handle:streamInfo():dynamicMetadata():set(filter, name, true)
  handle:clearRouteCache()
end
