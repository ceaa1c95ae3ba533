/* Included before every C++ source of llama.cpp.
 *
 * To some versions of GCC (12.2 for one) _tile_loadconfig reads only the first 8 of its 64 bytes.  The optimiser then
 * drops the stores of the tiles' rows and columns, and the first AMX instruction that uses a tile dies with SIGILL.
 */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>
struct switchyard_tile_config {
    unsigned char bytes[64];
};
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const struct switchyard_tile_config *)(config)))
#endif
