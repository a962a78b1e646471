-- Health of a DLionJob for Argo CD: the column "Argo CD" of docs/conditions.md.
-- Argo CD gives a script Lua 5.1 without the libraries `string` and `math`.

local health = { status = "Progressing", message = "not looked at yet" }
local status = obj.status or {}
if status.observedGeneration ~= obj.metadata.generation then
  return health
end

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local function holds(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end

local ready = conditions.Ready or { reason = "Pending" }
health.message = ready.reason
if ready.message ~= nil and ready.message ~= "" then
  health.message = ready.reason .. ": " .. ready.message
end

if holds("Stalled") then
  health.status = "Degraded"
elseif holds("Suspended") then
  health.status = "Suspended"
elseif holds("Succeeded") or ready.reason == "NotSelected" then
  health.status = "Healthy"
elseif holds("Degraded") then
  local lost = {}
  for _, site in ipairs(status.sites or {}) do
    if site.state ~= "Ready" then
      table.insert(lost, site.name)
    end
  end
  if #lost > 0 then
    health.message = health.message .. "; not complete: " .. table.concat(lost, ", ")
  end
end
return health
