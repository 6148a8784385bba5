-- One replica tells what it has taken of a key's limits, and asks for more: all of it or nothing, in one step.
--
-- Every replica owns what it took in each second, and tells it as a total ("3 requests, 512 tokens in second s"), so that
-- telling it twice changes nothing; sums over all replicas are kept beside. A command that comes late is refused by its
-- number. All keys of one account share a hash tag, hence a slot.
--
-- KEYS  1 the account: R, T sums of the window; r:S, t:S of second S; oldest; nr, nt newest;
--         v:REPLICA last number; g its generation
--       2 who runs how many: REPLICA -> "slots until"
--       3 what each replica took in the second of the request; 4... in the seconds that are told
-- ARGV  1 replica  2 number  3 is_known  4 is_confirmed  5 lease_s  6 slots it runs
--       7 requests  8 tokens  9 slots wanted    10 requests  11 tokens  12 slots allowed, -1: without limit
--       13 second of the request   then, for each of KEYS 4...: second, requests, tokens
-- Returns {status, time, R, T, running, nr, nt, (second, requests, tokens)... of a refusal}
local WINDOW, KEPT, AHEAD = 61, 75, 3
local account, running = KEYS[1], KEYS[2]
local replica, number = ARGV[1], tonumber(ARGV[2])
local wanted = {requests = tonumber(ARGV[7]), tokens = tonumber(ARGV[8]), slots = tonumber(ARGV[9])}
local allowed = {requests = tonumber(ARGV[10]), tokens = tonumber(ARGV[11]), slots = tonumber(ARGV[12])}
local stamp = tonumber(ARGV[13])

local time = redis.call('TIME')
local second = tonumber(time[1])
local now = time[1] .. '.' .. string.format('%06d', tonumber(time[2]))

if stamp < second - AHEAD or stamp > second + AHEAD then return {'clock', now} end
local oldest = tonumber(redis.call('HGET', account, 'oldest') or second)
if oldest > second + 2 * AHEAD or oldest < second - 10 * WINDOW then -- the clock was set: all begin again
  redis.call('DEL', account, running)
  oldest = second
end
local last = redis.call('HGET', account, 'v:' .. replica)
if not last and ARGV[3] == '1' then return {'unknown', now} end
if not last and ARGV[4] ~= '1' and redis.call('EXISTS', account) == 0 then return {'new', now} end
if last and number <= tonumber(last) then return {'stale', now} end

local generation = redis.call('HGET', account, 'g') -- values of an account that was lost since do not count
if not generation then
  generation = now
  redis.call('HSET', account, 'g', now)
end

local sums = {r = tonumber(redis.call('HGET', account, 'R') or 0), t = tonumber(redis.call('HGET', account, 'T') or 0)}
while oldest <= second - WINDOW do
  local gone = redis.call('HMGET', account, 'r:' .. oldest, 't:' .. oldest)
  sums.r = sums.r - tonumber(gone[1] or 0)
  sums.t = sums.t - tonumber(gone[2] or 0)
  if gone[1] or gone[2] then redis.call('HDEL', account, 'r:' .. oldest, 't:' .. oldest) end
  oldest = oldest + 1
end

local function require_generation(key)
  if redis.call('HGET', key, 'g') ~= generation then
    redis.call('DEL', key)
    redis.call('HSET', key, 'g', generation)
    redis.call('EXPIRE', key, KEPT + AHEAD)
  end
end

local function add(key, at, kind, amount)
  if amount == 0 then return end
  require_generation(key)
  redis.call('HINCRBY', key, kind .. ':' .. replica, amount)
  redis.call('HINCRBY', account, kind .. ':' .. at, amount)
  sums[kind] = sums[kind] + amount
  oldest = math.min(oldest, at)
  local newest = tonumber(redis.call('HGET', account, 'n' .. kind) or 0)
  if at > newest or newest > second + AHEAD then redis.call('HSET', account, 'n' .. kind, at) end
  redis.call('EXPIRE', key, KEPT + AHEAD)
end

for index = 4, #KEYS do
  local base = 14 + 3 * (index - 4)
  local at = tonumber(ARGV[base])
  if at > second - WINDOW and at <= second + AHEAD then
    require_generation(KEYS[index])
    local before = redis.call('HMGET', KEYS[index], 'r:' .. replica, 't:' .. replica)
    add(KEYS[index], at, 'r', tonumber(ARGV[base + 1]) - tonumber(before[1] or 0))
    add(KEYS[index], at, 't', tonumber(ARGV[base + 2]) - tonumber(before[2] or 0))
  end
end

local slots, others = tonumber(ARGV[6]), 0
local leases = redis.call('HGETALL', running)
for index = 1, #leases, 2 do
  local count, ends = string.match(leases[index + 1], '^(%d+) (%d+)$')
  if tonumber(ends) < second then
    redis.call('HDEL', running, leases[index])
  elseif leases[index] ~= replica then
    others = others + tonumber(count)
  end
end

local function exceeds(what, taken)
  return wanted[what] > 0 and allowed[what] >= 0 and taken + wanted[what] > allowed[what]
end
local status = 'ok'
if exceeds('slots', others + slots) then status = 'concurrency'
elseif exceeds('requests', sums.r) then status = 'requests'
elseif exceeds('tokens', sums.t) then status = 'tokens'
else
  add(KEYS[3], stamp, 'r', wanted.requests)
  add(KEYS[3], stamp, 't', wanted.tokens)
  slots = slots + wanted.slots
end

if slots > 0 then redis.call('HSET', running, replica, slots .. ' ' .. (second + tonumber(ARGV[5])))
else redis.call('HDEL', running, replica) end
redis.call('HSET', account, 'R', sums.r, 'T', sums.t, 'oldest', oldest, 'v:' .. replica, number)
redis.call('EXPIRE', account, KEPT)
redis.call('EXPIRE', running, KEPT)

local newest = redis.call('HMGET', account, 'nr', 'nt')
local reply = {status, now, sums.r, sums.t, others + slots, tonumber(newest[1] or 0), tonumber(newest[2] or 0)}
if status ~= 'ok' then
  for at = oldest, second + AHEAD do
    local amounts = redis.call('HMGET', account, 'r:' .. at, 't:' .. at)
    if amounts[1] or amounts[2] then
      reply[#reply + 1] = at
      reply[#reply + 1] = tonumber(amounts[1] or 0)
      reply[#reply + 1] = tonumber(amounts[2] or 0)
    end
  end
end
return reply
