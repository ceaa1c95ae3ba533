// What paged attention does on one page, for each instruction set and each type of keys and values.
#pragma once
#include "paged_attention.h"

constexpr int kMostQueries = 8;  // that go through a page together
constexpr int64_t kLanes = 16;

constexpr int64_t whole_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Some queries of one sequence that share a KV head.
struct PageQueries {
    int count;                   // up to kMostQueries
    const float *q[kMostQueries];  // [key_dim], scaled
    int64_t from[kMostQueries], to[kMostQueries];  // positions that each sees, besides the first `kept`
    float sink[kMostQueries];    // read if the layer has sinks
    float *out;                  // [count, whole_lanes(value_dim)]: zero at first, then the result
};

struct PagedKernels {
    void (*attend)(const SwitchyardPagedLayer &layer, const int32_t *pages, int64_t kv_head, const PageQueries &queries);
    // One head of one token into its page.
    void (*write)(const SwitchyardPagedLayer &layer, int64_t page, int64_t kv_head, int64_t slot, const float *key,
                  const float *value);
};

// By type of keys and values.
extern const PagedKernels kPortablePaged[4];
#if defined(__x86_64__) || defined(_M_X64)
extern const PagedKernels kAvx2Paged[4];
extern const PagedKernels kAvx512Paged[4];
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const PagedKernels kNeonPaged[4];
#endif
