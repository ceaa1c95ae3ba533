// In place of processor.cpp: a processor with AMX, whose tiles emulated_tiles.h has.
#include "processor.h"

Processor advertised() {
    Processor can;
    can.avx2 = can.avx512 = can.avx512_vnni = can.avx512_bf16 = can.amx_bf16 = true;
    return can;
}

bool amx_permitted() { return true; }
