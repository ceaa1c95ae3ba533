// The exchange of a card and the host under a scheduler that decides at every step who goes on: the same seed is the same
// order.  exchange_orders SEED ORDERS [MISTAKE]: so many orders, of a few tokens each; with a mistake of the host it has to
// fail.
#include <ucontext.h>

#include <unordered_set>

namespace {
void let_others_go_on();
}
#define SWITCHYARD_TURN() let_others_go_on()
#include "exchange_model.h"

namespace {

constexpr uint64_t kTokens = 6;
constexpr int kParties = 4;

struct Party {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    bool has_ended = false;
};

Party parties[kParties];
ucontext_t scheduler;
int going = -1;
Model *model;
std::mt19937_64 turns;
uint64_t order;  // a hash of who went on when

void let_others_go_on() {
    if (going >= 0) swapcontext(&parties[going].context, &scheduler);
}

bool has_ended;

void host() {
    std::mt19937_64 drawn(turns());
    for (uint64_t token = 1; token <= kTokens; ++token) {
        while (model->host.start() == 0) let_others_go_on();
        const bool cancels = drawn() % 5 == 0;
        for (auto changes = drawn() % 4; changes > 0; --changes) model->change_slots();
        if (cancels) model->host.cancel();
        while (!model->host.is_quiet()) let_others_go_on();
        if (model->host.result() != (cancels ? SWITCHYARD_TOKEN_CANCELLED : 0)) fail("a wrong result", token);
        model->check_records(!cancels);
        for (auto changes = drawn() % 3; changes > 0; --changes) model->change_slots();
    }
    if (drawn() % 2 != 0) {  // the end in the middle of a token
        while (model->host.start() == 0) let_others_go_on();
        model->host.stop();
        while (!model->host.has_finished(model->host.token())) let_others_go_on();
    }
    model->host.stop();
    has_ended = true;
}

void card() {
    for (uint64_t seen = 0; !has_ended;) {
        const uint64_t token = model->memory.flags->started.load() / 2;
        if (token == seen) continue;
        seen = token;
        model->run_card([] {  // the card's thread helps the worker, or does its work
            let_others_go_on();
            model->worker.serve([](auto... arguments) { return model->compute(arguments...); });
        });
    }
}

void worker() {
    const auto &flags = *model->memory.flags;
    while (!model->worker.is_stopped()) {
        if (model->mistake == kAnnouncesTooEarly) model->memory.flags->answered.store(flags.posted.load());
        model->worker.serve([](auto... arguments) { return model->compute(arguments...); });
    }
}

void copier() {
    while (!has_ended) model->copy();
}

void run_party() {
    static void (*const all[kParties])() = {host, card, worker, copier};
    all[going]();
    parties[going].has_ended = true;
    swapcontext(&parties[going].context, &scheduler);
}

// One order of all steps.
void run_in_order(uint64_t seed, Mistake mistake) {
    Model made(seed, mistake);
    model = &made;
    has_ended = false;
    turns.seed(seed);
    order = 0;
    for (auto &party : parties) {
        party.has_ended = false;
        getcontext(&party.context);
        party.context.uc_stack.ss_sp = party.stack.data();
        party.context.uc_stack.ss_size = party.stack.size();
        makecontext(&party.context, run_party, 0);
    }
    // Whoever is favoured goes on for longer: orders in which one is far behind are as likely as even ones.
    uint64_t favoured = 0;
    for (uint64_t step = 0; ; ++step) {
        if (step % 32 == 0) favoured = turns() % kParties;
        const uint64_t drawn = turns();
        const auto next = static_cast<int>(drawn % 3 == 0 ? drawn / 3 % kParties : favoured);
        bool all = true;
        for (const auto &party : parties) all = all && party.has_ended;
        if (all) break;
        if (step > 2000000) fail("nobody gets any further", made.host.token());
        if (parties[next].has_ended) continue;
        order = (order ^ static_cast<uint64_t>(next)) * 0x100000001b3ull;
        going = next;
        swapcontext(&scheduler, &parties[next].context);
        going = -1;
    }
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 3) return 2;
    const auto seed = std::strtoull(arguments[1], nullptr, 10), orders = std::strtoull(arguments[2], nullptr, 10);
    const auto mistake = static_cast<Mistake>(count > 3 ? std::atoi(arguments[3]) : 0);
    std::unordered_set<uint64_t> different;
    int64_t hits = 0, misses = 0;
    for (uint64_t number = 0; number < orders; ++number) {
        run_in_order(seed * 1000003 + number, mistake);
        different.insert(order);
        hits += model->hits;
        misses += model->misses;
    }
    if (different.size() < orders || hits == 0 || misses == 0) fail("the orders are not different", 0);
    std::printf("%zu orders, %lld hits, %lld misses\n", different.size(), static_cast<long long>(hits),
                static_cast<long long>(misses));
    return 0;
}
