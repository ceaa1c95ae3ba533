// The instruction sets that the processor reports, if the operating system saves their registers.
#pragma once

struct Processor {
    bool avx2 = false;         // with FMA and F16C
    bool avx_vnni = false;
    bool avx512 = false;       // F, BW and VL
    bool avx512_vnni = false;
    bool avx512_bf16 = false;  // with VNNI
    bool amx_bf16 = false;     // with AVX-512 BF16
    bool neon = false;
    bool neon_dot = false;     // asimddp
    bool neon_i8mm = false;    // i8mm, with asimddp
};

Processor advertised();

// Asks the operating system to permit AMX tiles for this process, whose saved state grows by them: whether it did.
bool amx_permitted();
