// Reading memory as fast as a pool's threads can: what no kernel beats that reads its weights once.
#include "read_memory.h"

#include "dispatch.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kPiece = 1 << 18;

struct Reading {
    uint64_t (*sum_of)(const uint8_t *, int64_t);
    const uint8_t *from;
    int64_t bytes;
    std::atomic<uint64_t> sum{0};
    Phase pieces;

    Reading(const uint8_t *from, int64_t bytes, int threads)
        : sum_of(kernels_in_use().rows->sum_bytes), from(from), bytes(bytes), pieces((bytes + kPiece - 1) / kPiece, threads, 1) {}
};

void work(void *argument) {
    auto &call = *static_cast<Reading *>(argument);
    call.pieces.run([&](int64_t begin, int64_t end) {
        const int64_t first = begin * kPiece, last = end * kPiece < call.bytes ? end * kPiece : call.bytes;
        call.sum.fetch_add(call.sum_of(call.from + first, last - first), std::memory_order_relaxed);
    });
}

}  // namespace

SWITCHYARD_API uint64_t switchyard_read_memory(SwitchyardPool *pool, const uint8_t *from, int64_t bytes) {
    Reading call(from, bytes, pool->threads());
    pool->run_all(work, &call);
    return call.sum.load();
}
