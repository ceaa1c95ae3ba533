// The end of a process that reads where a mapped file no longer is: one sentence instead of a dump.
#include "switchyard_kernels.h"

#if defined(_WIN32)

SWITCHYARD_API int32_t switchyard_watch_file(const void *, int64_t, const char *, int32_t) { return -1; }
SWITCHYARD_API void switchyard_unwatch_file(int32_t) {}

#else

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

namespace {

constexpr int kMost = 256, kSentence = 1024;

struct Watched {
    std::atomic<uintptr_t> begin{0};  // 0: free; written last, and read first
    uintptr_t bytes;
    size_t length;
    int32_t code;
    char sentence[kSentence];
};

Watched watched[kMost];
std::mutex changes;
bool is_installed = false;
struct sigaction before;

// Only what POSIX allows in a handler of signals.
void on_fault(int, siginfo_t *information, void *) {
    const auto address = reinterpret_cast<uintptr_t>(information->si_addr);
    for (Watched &each : watched) {
        const uintptr_t begin = each.begin.load(std::memory_order_acquire);
        if (begin && address >= begin && address - begin < each.bytes) {
            const ssize_t written = write(STDERR_FILENO, each.sentence, each.length);
            static_cast<void>(written);
            _exit(each.code);
        }
    }
    sigaction(SIGBUS, &before, nullptr);  // not ours: the same access meets whoever took care of it before
}

}  // namespace

SWITCHYARD_API int32_t switchyard_watch_file(const void *begin, int64_t bytes, const char *sentence, int32_t code) {
    const std::lock_guard<std::mutex> lock(changes);
    for (int i = 0; i < kMost; ++i) {
        Watched &each = watched[i];
        if (each.begin.load(std::memory_order_relaxed)) continue;
        if (!is_installed) {
            struct sigaction action = {};
            action.sa_sigaction = on_fault;
            action.sa_flags = SA_SIGINFO;
            if (sigaction(SIGBUS, &action, &before)) return -1;
            is_installed = true;
        }
        const size_t length = strlen(sentence);
        each.length = length < kSentence ? length : kSentence;
        memcpy(each.sentence, sentence, each.length);
        each.bytes = static_cast<uintptr_t>(bytes);
        each.code = code;
        each.begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
        return i;
    }
    return -1;
}

SWITCHYARD_API void switchyard_unwatch_file(int32_t number) {
    if (number >= 0 && number < kMost) watched[number].begin.store(0, std::memory_order_release);
}

#endif
