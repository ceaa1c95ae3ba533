// The exchange of a card and the host with the kernels of a real card: they run on a thread in the order of a captured step,
// beside the host, the worker and the copy engine.  What comes out has the same bits as if one place had computed it.
//
// Usage: exchange_driver SEED STEPS THREADS: layers of tokens, and threads of a block: 1 or 32.
#include <atomic>
#include <cstddef>
#include <thread>

namespace {
thread_local std::uint64_t delays = 1;
void random_delay() {
    delays = delays * 6364136223846793005ull + 1442695040888963407ull;
    const std::uint64_t drawn = delays >> 33;
    if (drawn % 61 == 0) std::this_thread::yield();
    for (std::uint64_t i = drawn % 7 == 0 ? drawn % 40 : 0; i > 0; --i) std::atomic_signal_fence(std::memory_order_seq_cst);
}
}  // namespace
#define SWITCHYARD_TURN() random_delay()
#include "exchange_model.h"
#include "exchange_thread.h"

#include "exchange.cu"

static_assert(sizeof(LayerRecord) == sizeof(SwitchyardCardLayer) && offsetof(LayerRecord, slots) == offsetof(SwitchyardCardLayer, slots), "records are the same");
static_assert(offsetof(LayerRecord, computed_ns) == offsetof(SwitchyardCardLayer, computed_ns) && offsetof(LayerRecord, taken_ns) == offsetof(SwitchyardCardLayer, taken_ns), "records are the same");
static_assert(sizeof(Flag) == FLAG_BYTES && offsetof(ExchangeFlags, started) == STARTED * FLAG_BYTES && offsetof(ExchangeFlags, posted) == POSTED * FLAG_BYTES &&
                  offsetof(ExchangeFlags, answered) == ANSWERED * FLAG_BYTES && offsetof(ExchangeFlags, overdue) == OVERDUE * FLAG_BYTES &&
                  offsetof(ExchangeFlags, finished) == FINISHED * FLAG_BYTES && offsetof(ExchangeFlags, cancelled) == CANCELLED * FLAG_BYTES &&
                  offsetof(ExchangeFlags, stopped) == STOPPED * FLAG_BYTES,
              "flags are the same");
static_assert(MOST_CHOSEN == SWITCHYARD_MOST_CHOSEN && MOST_ASKED == SWITCHYARD_MOST_VISITS && MISSED == kMissed && NO_EXPERT == kNobody, "numbers are the same");

namespace {
constexpr long long kShort = 30'000;  // nanoseconds: some answers take longer

struct Captured {
    Captured(Model& model, std::uint64_t seed) : model(model), drawn(seed) {
        const ExchangeMemory& memory = model.memory;
        const auto* begin = reinterpret_cast<const u8*>(memory.flags);
        const auto distance = [begin](const void* to) { return static_cast<const u8*>(to) - begin; };
        always.shared = reinterpret_cast<u8*>(memory.flags);
        always.own = own;
        always.slot_of = slot_of;
        always.rows_at = distance(memory.rows);
        always.answer_at = distance(memory.answer);
        always.records_at = distance(memory.records);
        for (int copy = 0; copy < 2; copy++) always.tables_at[copy] = distance(memory.tables[copy]);
        always.layers = kLayers;
        always.experts = kExperts;
        always.hidden = kHidden;
        always.depth = memory.shape.depth;
        always.ids = ids;
        always.count = kChosen;
        always.shares = shares;
        always.x = x;
        always.outputs = outputs;
        always.out = out;
    }

    template <int SIZE>
    void launch(void (*kernel)(const ExchangeArguments&), unsigned int blocks, int layer) {
        ExchangeArguments arguments = always;
        arguments.layer = layer;
        const emulated::Index grid{blocks, kernel == join<SIZE> ? static_cast<unsigned int>(always.rows) : 1, 1};
        if (SIZE == 1) emulated::run_alone(grid, drawn(), [&] { kernel(arguments); });
        else emulated::run(grid, SIZE, drawn(), [&] { kernel(arguments); });
        random_delay();
    }

    template <int SIZE>
    void run(bool is_hurried) {
        always.limit_ns = is_hurried ? kShort : kNoLimit;
        is_right = true;
        launch<SIZE>(begin<SIZE>, 2, 0);
        for (int layer = 0; layer < kLayers; layer++) {
            int64_t chosen[kRows * kChosen];
            always.rows = static_cast<int>(1 + drawn() % kRows);
            for (int row = 0; row < always.rows; row++) model.choose(chosen + row * kChosen);
            for (int i = 0; i < always.rows * kChosen; i++) {
                ids[i] = drawn() % 20 == 0 ? (drawn() % 2 ? kExperts : -1) : chosen[i];
                shares[i] = static_cast<float>(drawn() % 1000) / 1000;
            }
            for (u16& number : x) number = static_cast<u16>(drawn() % 10000);
            launch<SIZE>(post<SIZE>, 1, layer);
            products(layer);
            launch<SIZE>(join<SIZE>, 2, layer);
            is_right = is_right && std::memcmp(out, wanted(layer), sizeof(u16) * static_cast<std::size_t>(always.rows * kHidden)) == 0;
        }
        launch<SIZE>(finish<SIZE>, 1, 0);
    }

    // As the kernels of products: from what lies in the slots.
    void products(int layer) {
        for (int i = 0; i < always.rows * kChosen; i++) {
            const int slot = ids[i] >= 0 && ids[i] < kExperts ? slot_of[layer * kExperts + ids[i]] : NO_EXPERT;
            for (int at = 0; at < kHidden; at++) outputs[i * kHidden + at] = 0;
            if (slot < 0) continue;
            for (const int32_t& word : model.slots[slot]) {
                SWITCHYARD_TURN();
                if (word != layer * kExperts + ids[i]) fail("a slot holds another expert", own[0], word);
            }
            for (int at = 0; at < kHidden; at++) outputs[i * kHidden + at] = Bf16::of(output_of(layer, static_cast<int32_t>(ids[i]), x[i / kChosen * kHidden + at])).bits;
            model.hits++;
        }
    }

    const u16* wanted(int layer) {
        for (int at = 0; at < always.rows * kHidden; at++) {
            float sum = 0;
            const int first = at / kHidden * kChosen;
            for (int expert = 0; expert < kExperts; expert++)
                for (int i = first; i < first + kChosen; i++)
                    if (ids[i] == expert) sum = fmaf(shares[i], Bf16::of(output_of(layer, expert, x[at])).value(), sum);
            expected[at] = Bf16::of(sum).bits;
        }
        return expected;
    }

    Model& model;
    ExchangeArguments always{};
    std::mt19937_64 drawn;
    u64 own[2] = {};
    int slot_of[kLayers * kExperts];
    i64 ids[kRows * kChosen];
    float shares[kRows * kChosen];
    u16 x[kRows * kHidden], outputs[kRows * kChosen * kHidden], out[kRows * kHidden], expected[kRows * kHidden];
    bool is_right = true;  // of the last token; read when it is quiet
};
}  // namespace

int main(int count, char** words) {
    if (count != 4) return 2;
    const auto seed = static_cast<std::uint64_t>(std::strtoull(words[1], nullptr, 10));
    const auto steps = static_cast<std::uint64_t>(std::strtoull(words[2], nullptr, 10));
    const bool is_alone = std::strtol(words[3], nullptr, 10) == 1;
    Model model(seed, kNone);
    Captured card(model, seed + 5);
    std::uint64_t joined = 0, cancelled = 0, overdue = 0, right = 0;
    std::mt19937_64 drawn(seed + 1);
    std::atomic<bool> ends{false}, is_slow{false};
    {
        SwitchyardPool pool(2);
        ExchangeThread worker(model.memory, pool, [&](auto... arguments) {
            if (is_slow.load()) std::this_thread::sleep_for(std::chrono::nanoseconds(4 * kShort));
            return model.compute(arguments...);
        });
        std::thread copier([&] {
            delays = seed + 2;
            while (!ends.load()) if (!model.copy()) std::this_thread::yield();
        });
        std::thread kernels([&] {
            delays = seed + 3;
            std::uint64_t seen = 0;
            while (!ends.load()) {
                const std::uint64_t token = model.memory.flags->started.load() / 2;
                if (token == seen) { std::this_thread::yield(); continue; }
                seen = token;
                if (is_alone) card.run<1>(is_slow.load());
                else card.run<32>(is_slow.load());
            }
        });
        delays = seed + 4;
        while (model.host.token() * kLayers < steps) {
            is_slow = drawn() % 100 == 0;
            while (model.host.start() == 0) std::this_thread::yield();
            worker.wake();
            const std::uint64_t token = model.host.token();
            const bool cancels = drawn() % 50 == 0;
            for (auto changes = drawn() % 4; changes > 0; --changes) model.change_slots();
            if (cancels) model.host.cancel();
            // Who waits for a card computes, too.
            const bool helps = drawn() % 2;
            while (!model.host.is_quiet()) if (!helps || !worker.help(joined)) std::this_thread::yield();
            const int32_t result = model.host.result();
            if (result == SWITCHYARD_TOKEN_FAILED || (result == 0 && cancels)) fail("a wrong result", token, result);
            if (result == SWITCHYARD_TOKEN_CANCELLED && !cancels) fail("nobody cancelled", token);
            if (result == SWITCHYARD_TOKEN_OVERDUE && !is_slow) fail("nobody was late", token);
            if (result == 0 && !card.is_right) fail("other bits", token);
            cancelled += result == SWITCHYARD_TOKEN_CANCELLED;
            overdue += result == SWITCHYARD_TOKEN_OVERDUE;
            right += result == 0;
            model.check_records(false);
            if (drawn() % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(drawn() % 300));
        }
        // The end comes in the middle of a token, as when a window is closed.
        is_slow = false;
        while (model.host.start() == 0) std::this_thread::yield();
        worker.wake();
        model.host.stop();
        while (!model.host.has_finished(model.host.token())) std::this_thread::yield();
        ends = true;
        kernels.join();
        copier.join();
    }
    // What takes a coincidence of time has to be seen in long runs only: a busy machine may see none of it in a short one.
    if (model.hits == 0 || model.copies == 0 || right == 0 || (steps > 50000 && (overdue == 0 || cancelled == 0))) fail("nothing happened", 0);
    std::printf("%llu right, %llu cancelled, %llu overdue, %lld hits\n", static_cast<unsigned long long>(right), static_cast<unsigned long long>(cancelled),
                static_cast<unsigned long long>(overdue), static_cast<long long>(model.hits));
    return 0;
}
