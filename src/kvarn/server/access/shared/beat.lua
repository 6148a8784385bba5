-- A replica says that it is there, with what it has taken of each key's limits, and hears the same of the others.
--
-- KEYS  1 the replicas: REPLICA -> "until report"
-- ARGV  1 replica  2 lease_s  3 report, without spaces at its start; "": it leaves
-- Returns {time, whether it was known, (replica, report)...}
local time = redis.call('TIME')
local second = tonumber(time[1])
local known = redis.call('HEXISTS', KEYS[1], ARGV[1])
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], (second + tonumber(ARGV[2])) .. ' ' .. ARGV[3])
end
redis.call('EXPIRE', KEYS[1], 3600)
local reply = {time[1] .. '.' .. string.format('%06d', tonumber(time[2])), known}
local all = redis.call('HGETALL', KEYS[1])
for index = 1, #all, 2 do
  local ends, report = string.match(all[index + 1], '^(%d+) (.*)$')
  if tonumber(ends) < second then
    redis.call('HDEL', KEYS[1], all[index])
  else
    reply[#reply + 1] = all[index]
    reply[#reply + 1] = report
  end
end
return reply
