// The sum of memory's 64-bit numbers, and of the bytes that remain, in the widest vectors of the including file.
//
// Two runs of lines in turn, each asked for long before it is added, keep more of them under way than one does: what is
// read so is read as fast as memory gives it.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

inline uint64_t sum_bytes(const uint8_t *from, int64_t bytes) {
    typedef uint64_t Line __attribute__((vector_size(64)));
    constexpr int kLines = 2;
    constexpr int64_t kAhead = 4096, kStep = kLines * static_cast<int64_t>(sizeof(Line));
    const int64_t run = bytes / 2 / kStep * kStep;
    Line sums[2 * kLines] = {};
    for (int64_t at = 0; at < run; at += kStep)
        for (int which = 0; which < 2 * kLines; ++which) {
            const uint8_t *line = from + which % 2 * run + at + which / 2 * static_cast<int64_t>(sizeof(Line));
            Line read;
            std::memcpy(&read, line, sizeof read);
            sums[which] += read;
            __builtin_prefetch(line + kAhead);
        }
    uint64_t sum = 0;
    for (const Line &line : sums)
        for (int lane = 0; lane < 8; ++lane) sum += line[lane];
    int64_t at = 2 * run;
    for (uint64_t number; at + 8 <= bytes; at += 8, sum += number) std::memcpy(&number, from + at, sizeof number);
    for (; at < bytes; ++at) sum += from[at];
    return sum;
}

}  // namespace
