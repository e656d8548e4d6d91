//! The directory's Lua scripts.
//!
//! Each reads and writes a single key, except [`REGISTER`], which may also mark a lease, under another key, as replaced.

use redis::Script;

/// Writes a session's record, and returns the record stored afterwards.
///
/// The stored record is replaced only if it yields to the epoch at which the writer holds the session (`Record::yields_to`). If the stored
/// record already belongs to the writer, the session is written at its new epoch; otherwise it is written at the epoch held. When another
/// owner's record is replaced, that owner's lease is marked as replaced.
///
/// A value that cannot be parsed as a record is left unchanged and returned. If the key is not a hash, the result is an empty string.
///
/// `KEYS`: session, leases. `ARGV`: record at the new epoch, incarnation, epoch held, parameters, TTL, record at the epoch held, owner
/// followed by a space.
const REGISTER: &str = "
local stored = redis.pcall('HGET', KEYS[1], 'o')
if type(stored) == 'table' then return '' end
local incarnation, epoch
if stored then
    incarnation, epoch = string.match(stored, ' (%x+) (%d+)$')
    if not epoch then return stored end
    local stored_epoch, held = tonumber(epoch), tonumber(ARGV[3])
    local is_deleted = string.sub(stored, 1, 2) == '- '
    local is_same = stored_epoch == held and incarnation == ARGV[2]
    if stored_epoch > held or (stored_epoch == held and incarnation > ARGV[2]) or (is_same and is_deleted) then return stored end
end
local written = ARGV[6]
if stored and string.sub(stored, 1, string.len(ARGV[7])) == ARGV[7] then
    written = ARGV[1]
elseif stored and string.sub(stored, 1, 2) ~= '- ' then
    local lease = redis.call('HGET', KEYS[2], incarnation)
    if lease and string.sub(lease, -9) ~= ' replaced' then redis.call('HSET', KEYS[2], incarnation, lease .. ' replaced') end
end
redis.call('HSET', KEYS[1], 'o', written, 'p', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return written
";

/// Replaces the record `ARGV[1]` with `ARGV[2]` if it is still stored.
///
/// Returns the record stored afterwards, if any.
///
/// `KEYS`: session. `ARGV`: record to replace, new record, TTL.
const CLAIM: &str = "
local stored = redis.call('HGET', KEYS[1], 'o')
if stored == ARGV[1] then
    stored = ARGV[2]
    redis.call('HSET', KEYS[1], 'o', stored)
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return stored
";

/// Replaces a record with a tombstone, unless another instance's record wins.
///
/// Another instance's record wins if its epoch is the same as the given epoch or higher. The tombstone gets the higher of the two epochs,
/// and is written even if there is no record. A value that cannot be parsed as a record is left unchanged. The session's parameters are
/// removed too. Returns 1 if the tombstone was written, and 0 otherwise.
///
/// `KEYS`: session. `ARGV`: incarnation, epoch, TTL.
const DELETE: &str = "
local stored, epoch = redis.pcall('HGET', KEYS[1], 'o'), ARGV[2]
if type(stored) == 'table' then return 0 end
if stored then
    local incarnation, stored_epoch = string.match(stored, ' (%x+) (%d+)$')
    if not stored_epoch then return 0 end
    if incarnation ~= ARGV[1] and tonumber(stored_epoch) >= tonumber(epoch) then return 0 end
    if tonumber(stored_epoch) > tonumber(epoch) then epoch = stored_epoch end
end
redis.call('HDEL', KEYS[1], 'p')
redis.call('HSET', KEYS[1], 'o', '- ' .. ARGV[1] .. ' ' .. epoch)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
";

/// Renews a lease, or acquires one if the mode is `acquire`.
///
/// Returns whether the lease was still valid, whether one of the instance's records has been replaced, and the backend's time.
///
/// The lease is written with the time at which its heartbeat was created, or with the stored time if that is later. If the stored heartbeat
/// number is higher, the lease is left unchanged. Lapsed leases and leases too far ahead of the clock are removed. The script also records
/// when a client was last turned away or a lease last lapsed, unless a later time is already stored. If the clock has been set back, the
/// stored time may be ahead of the clock by more than the allowed skew. It is then reset to the current time.
///
/// `KEYS`: leases. `ARGV`: incarnation, turned-away age, run, marks, address, lease TTL, skew, mode, key TTL, turned-away field, creation
/// time, number.
const LEASE: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local leases, was_alive, was_replaced, is_overtaken, last, lapsed = redis.call('HGETALL', KEYS[1]), 0, 0, false, 0, 0
local created = math.min(now, tonumber(ARGV[11]) or now)
for i = 1, #leases, 2 do
    local renewed = tonumber(string.match(leases[i + 1], '^%d+')) or 0
    if leases[i] == ARGV[10] then
        last = renewed
        if renewed - now > tonumber(ARGV[7]) then
            redis.call('HSET', KEYS[1], ARGV[10], string.format('%.0f', now))
            last = now
        end
    elseif now - renewed >= tonumber(ARGV[6]) or renewed - now > tonumber(ARGV[7]) then
        redis.call('HDEL', KEYS[1], leases[i])
        lapsed = math.max(lapsed, math.min(renewed + tonumber(ARGV[6]), now))
    elseif leases[i] == ARGV[1] then
        was_alive = 1
        if string.sub(leases[i + 1], -9) == ' replaced' then was_replaced = 1 end
        created = math.max(created, renewed)
        is_overtaken = (tonumber(string.match(leases[i + 1], '^%d+ (%d+)')) or 0) > tonumber(ARGV[12])
    end
end
if not is_overtaken and (was_alive == 1 or ARGV[8] == 'acquire') then
    local lease = table.concat({string.format('%.0f', created), ARGV[12], ARGV[3], ARGV[4], ARGV[5]}, ' ')
    redis.call('HSET', KEYS[1], ARGV[1], lease)
end
local turned_away = math.max(now - (tonumber(ARGV[2]) or now), lapsed)
if turned_away > last then redis.call('HSET', KEYS[1], ARGV[10], string.format('%.0f', turned_away)) end
redis.call('PEXPIRE', KEYS[1], ARGV[9])
return {was_alive, was_replaced, now}
";

/// The scripts, each with the hash that identifies it to the backend.
pub(super) struct Scripts {
    pub(super) register: Script,
    pub(super) claim: Script,
    pub(super) delete: Script,
    pub(super) lease: Script,
}

// === impl Scripts ===

impl Default for Scripts {
    fn default() -> Self {
        Self {
            register: Script::new(REGISTER),
            claim: Script::new(CLAIM),
            delete: Script::new(DELETE),
            lease: Script::new(LEASE),
        }
    }
}
