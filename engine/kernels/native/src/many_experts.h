// The experts of a layer for the many tokens of a prefill or a batch.
#pragma once
#include <cstdint>

#include "switchyard_kernels.h"
#include "thread_pool.h"

// As switchyard_experts.  Experts are taken in waves of about a thousand visits, so that the activations
// between their matrices stay in the cache; sums are in the experts' order, whichever thread computes them.
void many_experts(SwitchyardPool &pool, const SwitchyardExperts &layer, int32_t tokens, int32_t k, const uint16_t *x,
                  const int64_t *index, const float *weights, uint16_t *out);
