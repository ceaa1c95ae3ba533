// What the peer's process asks of ik_llama.cpp, in plain C: its structures change from version to version, so they are
// filled in here, by the header that the library was built from.

#include <vector>

#include "llama.h"

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C"
#endif

EXPORT llama_model * peer_model(const char * path, bool repack) {
    llama_backend_init();
    llama_model_params options = llama_model_default_params();
    options.n_gpu_layers = 0;
    options.repack_tensors = repack;
    options.use_mmap = !repack;  // as its command line has it: what is repacked cannot stay in the file
    return llama_model_load_from_file(path, options);
}

EXPORT void peer_drop_model(llama_model * model) { llama_free_model(model); }

EXPORT llama_context * peer_context(
    llama_model * model, int threads, int tokens, int sequences, bool flash, bool fused, int latent) {
    llama_context_params settings = llama_context_default_params();
    settings.n_ctx = tokens;
    settings.n_seq_max = sequences;
    settings.n_threads = settings.n_threads_batch = threads;
    settings.flash_attn = flash;
    settings.fused_moe_up_gate = fused;
    settings.mla_attn = latent;
    return llama_init_from_model(model, settings);
}

EXPORT void peer_drop_context(llama_context * context) { llama_free(context); }

EXPORT int peer_vocabulary(llama_model * model) { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }

EXPORT int peer_most_at_once(llama_context * context) { return llama_n_batch(context); }

EXPORT void peer_clear(llama_context * context) { llama_kv_cache_clear(context); }

EXPORT int peer_run(
    llama_context * context, int count, const int * tokens, const int * places, const int * sequences,
    const signed char * wanted) {
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int at = 0; at < count; ++at) {
        batch.token[at] = tokens[at];
        batch.pos[at] = places[at];
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = sequences[at];
        batch.logits[at] = wanted[at];
    }
    const int status = llama_decode(context, batch);
    llama_synchronize(context);
    llama_batch_free(batch);
    return status;
}

EXPORT const float * peer_logits(llama_context * context, int place) { return llama_get_logits_ith(context, place); }

// Appends the keys and values of sequence 0 to it `times` times, each copy at the places after the one before.
EXPORT bool peer_repeat(llama_context * context, int length, int times) {
    std::vector<uint8_t> state(llama_state_seq_get_size(context, 0, 0));
    const size_t size = llama_state_seq_get_data(context, state.data(), state.size(), 0, 0);
    for (int copy = 1; copy <= times; ++copy) {
        if (!size || !llama_state_seq_set_data(context, state.data(), size, 1, 0)) return false;
        llama_kv_cache_seq_add(context, 1, 0, -1, copy * length);
        llama_kv_cache_seq_cp(context, 1, 0, -1, -1);
        llama_kv_cache_seq_rm(context, 1, -1, -1);
    }
    return llama_kv_cache_update(context) == 0;
}
