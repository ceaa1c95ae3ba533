// Reading memory as fast as a pool's threads can: what no kernel beats that reads its weights once.
#include "read_memory.h"

#include <cstring>

#include "thread_pool.h"

namespace {

constexpr int64_t kPiece = 1 << 16;

struct Reading {
    const uint8_t *from;
    int64_t bytes;
    std::atomic<uint64_t> sum{0};
    Phase pieces;

    Reading(const uint8_t *from, int64_t bytes, int threads)
        : from(from), bytes(bytes), pieces((bytes + kPiece - 1) / kPiece, threads, 1) {}
};

uint64_t sum_of(const uint8_t *from, int64_t bytes) {
    constexpr int kLanes = 8;  // a cache line, in as many chains of additions
    uint64_t sums[kLanes] = {};
    for (; bytes >= kLanes * 8; from += kLanes * 8, bytes -= kLanes * 8) {
        uint64_t line[kLanes];
        std::memcpy(line, from, sizeof line);
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += line[lane];
#if defined(__GNUC__)
        __builtin_prefetch(from + 1024);
#endif
    }
    uint64_t sum = 0;
    for (const uint64_t lane : sums) sum += lane;
    for (; bytes > 0; ++from, --bytes) sum += *from;
    return sum;
}

void work(void *argument) {
    auto &call = *static_cast<Reading *>(argument);
    call.pieces.run([&](int64_t begin, int64_t end) {
        const int64_t first = begin * kPiece, last = end * kPiece < call.bytes ? end * kPiece : call.bytes;
        call.sum.fetch_add(sum_of(call.from + first, last - first), std::memory_order_relaxed);
    });
}

}  // namespace

SWITCHYARD_API uint64_t switchyard_read_memory(SwitchyardPool *pool, const uint8_t *from, int64_t bytes) {
    Reading call(from, bytes, pool->threads());
    pool->run_all(work, &call);
    return call.sum.load();
}
