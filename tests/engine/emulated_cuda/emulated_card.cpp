#include "emulated_card.h"

#include <algorithm>
#include <random>
#include <vector>

#ifdef EMULATED_THREADS
#include <pthread.h>

#include <thread>
#else
#include <csetjmp>

#include <ucontext.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#endif

namespace emulated {
Index block_index, grid_size;
#ifdef EMULATED_THREADS
thread_local Index thread_index;
thread_local unsigned int turn;
#else
Index thread_index;
unsigned int turns[1024];
#define turn turns[thread_index.x]
#endif
static std::uint32_t exchanged[2][32][32];

std::uint32_t* exchange(std::uint32_t mine) {
    std::uint32_t* lanes = exchanged[turn ^= 1][thread_index.x / 32];
    lanes[thread_index.x % 32] = mine;
    warp_barrier();
    return lanes;
}

namespace {
std::vector<Index> in_random_order(Index grid, std::uint64_t seed) {
    std::vector<Index> blocks;
    for (unsigned int z = 0; z < grid.z; z++)
        for (unsigned int y = 0; y < grid.y; y++)
            for (unsigned int x = 0; x < grid.x; x++) blocks.push_back(Index{x, y, z});
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(seed));
    return blocks;
}
}  // namespace

#ifdef EMULATED_THREADS
namespace {
pthread_barrier_t whole_block, warps[32], all_done;
}  // namespace

void block_barrier() { pthread_barrier_wait(&whole_block); }
void warp_barrier() { pthread_barrier_wait(&warps[thread_index.x / 32]); }

void run(Index grid, unsigned int threads, std::uint64_t seed, const std::function<void()>& kernel) {
    grid_size = grid;
    const std::vector<Index> blocks = in_random_order(grid, seed);
    pthread_barrier_init(&whole_block, nullptr, threads);
    pthread_barrier_init(&all_done, nullptr, threads);
    for (unsigned int warp = 0; warp < threads / 32; warp++) pthread_barrier_init(&warps[warp], nullptr, 32);
    std::vector<std::thread> running;
    for (unsigned int thread = 0; thread < threads; thread++) {
        running.emplace_back([&, thread] {
            thread_index = Index{thread, 0, 0};
            for (const Index& block : blocks) {
                if (thread == 0) block_index = block;
                pthread_barrier_wait(&all_done);
                kernel();
                pthread_barrier_wait(&all_done);
            }
        });
    }
    for (std::thread& thread : running) thread.join();
}

void run_alone(Index grid, std::uint64_t seed, const std::function<void()>& kernel) { run(grid, 1, seed, kernel); }
#else
namespace {
constexpr std::size_t STACK = 256 * 1024;

struct Fiber {
    ucontext_t first;  // only to begin on a stack of its own: switching by it asks the system each time
    jmp_buf context;
    std::vector<char> stack;
    bool is_begun = false, is_done = true;
    void* fake_stack = nullptr;
};
std::vector<Fiber> fibers;
jmp_buf scheduler;
unsigned int current, unfinished;
const std::function<void()>* running;
std::uint64_t progress;  // grows whenever a barrier opens or a thread ends
const void* scheduler_stack;
std::size_t scheduler_size;

struct Barrier { unsigned int waiting = 0, opened = 0; };
Barrier of_block, of_warps[32];

#if defined(__SANITIZE_ADDRESS__)
void leave(void** keep, const void* stack, std::size_t size) { __sanitizer_start_switch_fiber(keep, stack, size); }
void enter(void* kept, const void** stack, std::size_t* size) { __sanitizer_finish_switch_fiber(kept, stack, size); }
#else
void leave(void**, const void*, std::size_t) {}
void enter(void*, const void**, std::size_t*) {}
#endif

void yield() {
    Fiber& fiber = fibers[current];
    leave(&fiber.fake_stack, scheduler_stack, scheduler_size);
    if (_setjmp(fiber.context) == 0) _longjmp(scheduler, 1);
    enter(fiber.fake_stack, &scheduler_stack, &scheduler_size);
}

void wait(Barrier& barrier, unsigned int expected) {
    const unsigned int opened = barrier.opened;
    if (++barrier.waiting == expected) {
        barrier.waiting = 0;
        barrier.opened++;
        progress++;
        return;
    }
    while (barrier.opened == opened) yield();
}

void begin() {
    enter(nullptr, &scheduler_stack, &scheduler_size);
    (*running)();
    fibers[current].is_done = true;
    unfinished--;
    progress++;
    leave(nullptr, scheduler_stack, scheduler_size);
    _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
    if (fiber.is_begun) _longjmp(fiber.context, 1);
    fiber.is_begun = true;
    setcontext(&fiber.first);
}

unsigned int threads_of_block;
}  // namespace

void block_barrier() { wait(of_block, threads_of_block); }
void warp_barrier() { wait(of_warps[current / 32], 32); }

void run(Index grid, unsigned int threads, std::uint64_t seed, const std::function<void()>& kernel) {
    grid_size = grid;
    threads_of_block = threads;
    running = &kernel;
    if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
    for (const Index& block : in_random_order(grid, seed)) {
        block_index = block;
        for (unsigned int thread = 0; thread < threads; thread++) {
            Fiber& fiber = fibers[thread];
            fiber.stack.resize(STACK);
            getcontext(&fiber.first);
            fiber.first.uc_stack.ss_sp = fiber.stack.data();
            fiber.first.uc_stack.ss_size = STACK;
            fiber.first.uc_link = nullptr;
            fiber.is_begun = fiber.is_done = false;
            fiber.fake_stack = nullptr;
            makecontext(&fiber.first, begin, 0);
        }
        unfinished = threads;
        of_block = Barrier();
        for (Barrier& barrier : of_warps) barrier = Barrier();
        while (unfinished != 0) {
            const std::uint64_t before = progress;
            for (current = 0; current < threads; current++) {
                if (fibers[current].is_done) continue;
                void* kept = nullptr;
                leave(&kept, fibers[current].stack.data(), STACK);
                thread_index.x = current;
                if (_setjmp(scheduler) == 0) resume(fibers[current]);
                enter(kept, nullptr, nullptr);
            }
            if (progress == before) {
                std::fprintf(stderr, "block %u %u %u: a barrier that not all threads reach\n", block.x, block.y, block.z);
                std::abort();
            }
        }
    }
}

void run_alone(Index grid, std::uint64_t seed, const std::function<void()>& kernel) {
    grid_size = grid;
    threads_of_block = 1;
    thread_index = Index{};
    of_block = Barrier();
    for (const Index& block : in_random_order(grid, seed)) {
        block_index = block;
        kernel();
    }
}
#endif

float float_of_half(std::uint16_t bits) {
    const int sign = bits >> 15, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value;
    if (exponent == 31) {
        value = fraction ? NAN : INFINITY;
    } else {
        value = exponent ? std::ldexp(1024.0f + static_cast<float>(fraction), exponent - 25) : std::ldexp(static_cast<float>(fraction), -24);
    }
    return sign ? -value : value;
}

std::uint16_t half_of_float(float value) {
    const std::uint16_t sign = bits_of(value) >> 31 ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (!(size == size)) return 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < std::ldexp(1.0f, -14)) return sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(size, 24)));
    int exponent;
    std::frexp(size, &exponent);  // size = f 2^exponent, 1/2 <= f < 1
    const int whole = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));
    return static_cast<std::uint16_t>(sign | (((exponent + 13) << 10) + whole));
}
}  // namespace emulated
