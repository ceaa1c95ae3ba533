#include "stamps.h"

#include <atomic>
#include <new>

#include "clock.h"

namespace {

constexpr uint64_t kStamps = 1 << 16, kChosen = 1 << 19;  // some seconds of the fastest decode

// One thread writes and one reads.  The counts only grow; a place is its count modulo the capacity.
struct Ring {
    SwitchyardStampCounts counts{};
    std::atomic<uint64_t> written{0}, chosen_written{0}, read{0}, chosen_read{0};
    SwitchyardStamp stamps[kStamps];
    int32_t chosen[kChosen];
};

std::atomic<Ring *> recording{nullptr};
std::atomic_flag writing = ATOMIC_FLAG_INIT;

// The ring is never freed: a step that is under way may still write into it.
Ring *the_ring() {
    static Ring *ring = new (std::nothrow) Ring;  // its pages are touched when they are written
    return ring;
}

}  // namespace

Stamp::Stamp(const void *which, const int64_t *chosen, int64_t count)
    : which_(which),
      chosen_(chosen),
      count_(count),
      begun_ns_(recording.load(std::memory_order_relaxed) ? clock_ns() : 0) {}

bool Stamp::is_first(int64_t place) const {
    for (int64_t i = 0; i < place; ++i)
        if (chosen_[i] == chosen_[place]) return false;
    return true;
}

Stamp::~Stamp() {
    Ring *ring = begun_ns_ ? recording.load(std::memory_order_acquire) : nullptr;
    if (!ring || writing.test_and_set(std::memory_order_acquire)) return;
    const uint64_t place = ring->written.load(std::memory_order_relaxed);
    const uint64_t first = ring->chosen_written.load(std::memory_order_relaxed);
    uint64_t count = 0;
    for (int64_t i = 0; i < count_; ++i) count += is_first(i);
    ring->counts.chosen += count;
    const int64_t ended_ns = ring->counts.ended_ns = clock_ns();
    if (place - ring->read.load(std::memory_order_acquire) >= kStamps ||
        first + count - ring->chosen_read.load(std::memory_order_acquire) > kChosen) {
        ++ring->counts.dropped;
    } else {
        ring->stamps[place % kStamps] = {which_, begun_ns_, ended_ns, static_cast<int64_t>(count)};
        uint64_t next = first;
        for (int64_t i = 0; i < count_; ++i)
            if (is_first(i)) ring->chosen[next++ % kChosen] = static_cast<int32_t>(chosen_[i]);
        ring->chosen_written.store(first + count, std::memory_order_relaxed);
        ring->written.store(place + 1, std::memory_order_release);
        ++ring->counts.written;
    }
    writing.clear(std::memory_order_release);
}

SWITCHYARD_API const SwitchyardStampCounts *switchyard_stamps(int32_t on) {
    Ring *ring = the_ring();
    recording.store(on ? ring : nullptr, std::memory_order_release);
    return ring ? &ring->counts : nullptr;
}

SWITCHYARD_API int64_t switchyard_take_stamps(int64_t most, SwitchyardStamp *stamps, int64_t most_chosen,
                                              int32_t *chosen) {
    Ring *ring = the_ring();
    if (!ring) return 0;
    const uint64_t begin = ring->read.load(std::memory_order_relaxed);
    const uint64_t end = ring->written.load(std::memory_order_acquire);
    uint64_t first = ring->chosen_read.load(std::memory_order_relaxed);
    int64_t taken = 0;
    for (uint64_t place = begin; place < end && taken < most; ++place) {
        const SwitchyardStamp &stamp = ring->stamps[place % kStamps];
        if (stamp.count > most_chosen) break;
        for (int64_t i = 0; i < stamp.count; ++i) *chosen++ = ring->chosen[first++ % kChosen];
        most_chosen -= stamp.count;
        stamps[taken++] = stamp;
    }
    ring->chosen_read.store(first, std::memory_order_release);
    ring->counts.taken = begin + static_cast<uint64_t>(taken);
    ring->read.store(begin + static_cast<uint64_t>(taken), std::memory_order_release);
    return taken;
}
