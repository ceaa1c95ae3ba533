// The card's side of tokens that it runs by itself: what `ExchangeCard` in exchange.h of the native kernels is for the
// emulated card, whose rules hold here as they stand.
//
// A token is one graph.  `begin` learns from memory which token it is and copies the table of slots to the card; in each
// layer `post` looks experts up, writes the layer's record and asks the host for those that have no slot; the kernels of
// products compute the others meanwhile; `join` waits for the answer and adds all up; `finish` says that no slot is read any
// more.  Nothing that differs between tokens is an argument, since a graph repeats its arguments.
#include "flags.h"

constexpr int MOST_CHOSEN = 32, MOST_ASKED = 128;  // experts of a row, and of all rows
constexpr int MISSED = -1, NO_EXPERT = -2;  // in place of a slot

// As `SwitchyardCardLayer` in switchyard_exchange.h.
struct LayerRecord {
    u64 token;
    i64 begun_ns, posted_ns, computed_ns, joined_ns;  // by the card's clock
    i64 taken_ns, answered_ns;                        // by the host's
    i64 rows;
    int count, missed;
    int experts[MOST_ASKED];
    int slots[MOST_ASKED];
};

// Distances are in bytes from the begin of `shared`.
struct ExchangeArguments {
    u8* shared;  // what both see, where the card has it
    u64* own;    // the card's: the token under way, and the last that was given up
    int* slot_of;  // [layers, experts] the card's: the table of slots, for this token
    const i64* ids;       // [rows, count] the experts that the layer chose
    const float* shares;  // [rows, count]
    const u16* x;         // bf16 [rows, hidden], of experts that are missed
    const u16* outputs;   // bf16 [rows, count, hidden], of experts in slots; null: there are no slots
    u16* out;             // bf16 [rows, hidden]
    i64 limit_ns;         // for an answer
    i64 rows_at, answer_at, records_at, tables_at[2];
    int layers, experts, hidden, depth, layer, rows, count;
};

__device__ __forceinline__ u64* flag_of(const ExchangeArguments& a, int flag) { return reinterpret_cast<u64*>(a.shared + flag * FLAG_BYTES); }

__device__ __forceinline__ LayerRecord* record_of(const ExchangeArguments& a, u64 token) {
    const i64 place = static_cast<i64>(token % static_cast<u64>(a.depth)) * a.layers + a.layer;
    return reinterpret_cast<LayerRecord*>(a.shared + a.records_at) + place;
}

// Layers of all tokens are numbered through from 1.
__device__ __forceinline__ u64 sequence_of(const ExchangeArguments& a, u64 token) {
    return (token - 1) * static_cast<u64>(a.layers) + static_cast<u64>(a.layer) + 1;
}

// Grid: pieces of the table.
template <int SIZE>
__device__ __forceinline__ void begin(const ExchangeArguments& a) {
    const u64 started = load_flag(flag_of(a, STARTED));
    const int entries = a.layers * a.experts, step = SIZE * static_cast<int>(gridDim.x);
    const int* table = reinterpret_cast<const int*>(a.shared + a.tables_at[started % 2]);
    for (int entry = static_cast<int>(blockIdx.x * SIZE + threadIdx.x); entry < entries; entry += step) a.slot_of[entry] = load_shared(table + entry);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.own[0] = started / 2;
}

// Grid: 1.
template <int SIZE>
__device__ __forceinline__ void post(const ExchangeArguments& a) {
    __shared__ int found[MOST_ASKED];
    const int visits = a.rows * a.count;
    const int* slot_of = a.slot_of + static_cast<i64>(a.layer) * a.experts;
    const u64 token = a.own[0];
    const bool is_given_up = a.own[1] == token;
    LayerRecord* record = record_of(a, token);
    const i64 begun_ns = card_clock_ns();
    for (int i = threadIdx.x; i < visits; i += SIZE) {
        const i64 id = a.ids[i];
        const int slot = id >= 0 && id < a.experts ? slot_of[id] : NO_EXPERT;
        found[i] = slot;
        record->experts[i] = static_cast<int>(id);
        record->slots[i] = slot;
    }
    __syncthreads();
    int missed = 0;
    for (int i = 0; i < visits; i++) missed += found[i] == MISSED;
    const bool asks = missed > 0 && !is_given_up;
    u16* rows = reinterpret_cast<u16*>(a.shared + a.rows_at);
    for (int i = threadIdx.x; asks && i < a.rows * a.hidden; i += SIZE) rows[i] = a.x[i];
    if (threadIdx.x == 0) {
        record->token = token;
        record->begun_ns = begun_ns;
        record->posted_ns = asks ? card_clock_ns() : 0;
        record->computed_ns = record->joined_ns = record->taken_ns = record->answered_ns = 0;
        record->rows = a.rows;
        record->count = a.count;
        record->missed = missed;
    }
    announce();
    if (threadIdx.x == 0 && asks) store_flag(flag_of(a, POSTED), sequence_of(a, token));
}

// Whether what was asked for is there.  By one thread of each block; a block that gives up lets the others know.
__device__ __forceinline__ bool is_answered(const ExchangeArguments& a, u64 token) {
    const u64 sequence = sequence_of(a, token);
    i64 begun_ns = 0;
    for (u32 round = 1;; round++) {
        if (look_at(a.own + 1) == token) return false;
        if (load_flag(flag_of(a, ANSWERED)) >= sequence) return true;
        rest();
        if (round % 16 != 0) continue;
        const bool is_cancelled = load_flag(flag_of(a, CANCELLED)) >= token || load_flag(flag_of(a, STOPPED)) != 0;
        const i64 now_ns = card_clock_ns();
        if (begun_ns == 0) begun_ns = now_ns;
        if (!is_cancelled && now_ns - begun_ns < a.limit_ns) continue;
        if (!is_cancelled) store_flag(flag_of(a, OVERDUE), sequence);
        let_know(a.own + 1, token);
        return false;
    }
}

// Grid: pieces of a row; rows.  Outputs are added in the order of the experts' numbers, whoever computed
// them: bf16, as the kernels of products give them.  The host's come by experts, of each by rows.
template <int SIZE>
__device__ __forceinline__ void join(const ExchangeArguments& a) {
    __shared__ int in_order[MOST_CHOSEN];   // visits of the row, by their experts
    __shared__ int answer_of[MOST_CHOSEN];  // by visits: the row of the answer; less: none is needed, or nobody computes it
    __shared__ bool is_asked, is_there;     // whether the host was asked about any row, and has answered
    const int* slot_of = a.slot_of + static_cast<i64>(a.layer) * a.experts;
    const int row = static_cast<int>(blockIdx.y), first = row * a.count;
    const bool is_first = blockIdx.x == 0 && row == 0 && threadIdx.x == 0;
    const u64 token = a.own[0];
    LayerRecord* record = record_of(a, token);
    if (is_first) record->computed_ns = card_clock_ns();
    if (threadIdx.x == 0) is_asked = false;
    __syncthreads();
    for (int i = threadIdx.x; i < a.rows * a.count; i += SIZE) {
        const i64 id = a.ids[i];
        if (id >= 0 && id < a.experts && slot_of[id] == MISSED) is_asked = true;
    }
    for (int i = threadIdx.x; i < a.count; i += SIZE) {
        const i64 id = a.ids[first + i];
        int before = 0, missed_before = 0;
        for (int other = 0; other < a.rows * a.count; other++) {
            const i64 of = a.ids[other];
            if (of > id || (of == id && other >= first + i)) continue;
            before += other >= first && other < first + a.count;
            missed_before += of >= 0 && of < a.experts && slot_of[of] == MISSED;
        }
        const int slot = id >= 0 && id < a.experts ? slot_of[id] : NO_EXPERT;
        in_order[before] = i;
        answer_of[i] = slot == MISSED ? missed_before : slot < 0 ? NO_EXPERT : MISSED;
    }
    __syncthreads();
    if (threadIdx.x == 0) is_there = !is_asked || is_answered(a, token);
    __syncthreads();
    const float* answer = reinterpret_cast<const float*>(a.shared + a.answer_at);
    const int step = SIZE * static_cast<int>(gridDim.x);
    for (int column = static_cast<int>(blockIdx.x * SIZE + threadIdx.x); column < a.hidden; column += step) {
        float sum = 0;
        for (int i = 0; i < a.count; i++) {
            const int visit = in_order[i], from = answer_of[visit];
            if (from == NO_EXPERT || (from >= 0 && !is_there)) continue;
            const Bf16 output = from >= 0 ? Bf16::of(load_shared(answer + static_cast<i64>(from) * a.hidden + column))
                                          : Bf16{a.outputs[static_cast<i64>(first + visit) * a.hidden + column]};
            sum = fmaf(a.shares[first + visit], output.value(), sum);
        }
        a.out[static_cast<i64>(row) * a.hidden + column] = Bf16::of(sum).bits;
    }
    if (is_first) record->joined_ns = card_clock_ns();
}

// Grid: 1.
template <int SIZE>
__device__ __forceinline__ void finish(const ExchangeArguments& a) {
    if (threadIdx.x == 0) store_flag(flag_of(a, FINISHED), a.own[0]);
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) exchange_kernel(const ExchangeArguments arguments) { SWITCHYARD_PART<THREADS>(arguments); }
#endif
