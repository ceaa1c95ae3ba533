// Compiled with AVX-512 F, BW, VL and BF16 and AMX BF16, where the compiler knows them.
//
// A matrix in bf16 is multiplied as it is stored, one of blocks once they are unpacked to bf16 in the cache: 16 rows are the
// first operand, 16 vectors as pairs of columns the second.  In tiles of quantised formats, 4 columns of a row lie side by
// side, which is almost the layout of pairs that the second operand needs, so there the vectors are the first operand.
// Quantised weights are widened once for all vectors: with a scale for each 32 columns, integer sums would have to leave the tile registers after every product.
#include "many_kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include "many_pairs.h"
#include "many_rows.h"

namespace {

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the instruction reads 64 bytes");

// Not with _tile_loadconfig: some versions of GCC (12.2, for one) assume that it reads only the first 8 bytes, and drop the
// stores to the others.  Tests bring tiles of their own.
#if !defined(SWITCHYARD_CONFIGURE_TILES)
#define SWITCHYARD_CONFIGURE_TILES(config) __asm__ volatile("ldtilecfg\t%X0" ::"m"(config))
#endif

// Configures eight full tiles for its lifetime.
class Tiles {
  public:
    Tiles() { SWITCHYARD_CONFIGURE_TILES(config_); }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;

  private:
    alignas(64) TileConfig config_;
};

int64_t panel_room(int32_t, int64_t columns) { return rows_room(columns); }

bool is_in_rows(int32_t format) { return format == SWITCHYARD_BF16 || format == SWITCHYARD_BLOCKS; }

void pack_tile(int32_t format, const uint16_t *const *rows, int64_t count, int64_t columns, uint8_t *out) {
    if (is_in_rows(format)) return pack_pairs(rows, count, columns, out);
    for (int64_t at = 0; at < columns; at += kGroup, out += kTileBytes)
        for (int64_t v = 0; v < 16; ++v)
            _mm512_store_si512(out + 64 * v,
                               v < count ? load_group(rows[v], at, columns) : _mm512_setzero_si512());
}

static inline __m512 scales_of(const uint16_t *scales) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(scales)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline __m512 half_scales_of(const uint16_t *scales) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(scales)));
}

// Two numbers of each of 16 rows, side by side.
static inline __m512i pairs_of(__m512 first, __m512 second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Half a tile: [16 pairs of columns, 16 rows, 2].
static inline void widen_int8(const uint8_t *half, __m512 scale, uint8_t *out) {
    for (int j = 0; j < 8; ++j) {
        const __m512i q = _mm512_loadu_si512(half + 64 * j);
        const auto column = [&](__m512i shifted) {
            return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(shifted, 24)), scale);
        };
        const __m512i first = pairs_of(column(_mm512_slli_epi32(q, 24)), column(_mm512_slli_epi32(q, 16)));
        const __m512i second = pairs_of(column(_mm512_slli_epi32(q, 8)), column(q));
        _mm512_store_si512(out + 128 * j, first);
        _mm512_store_si512(out + 128 * j + 64, second);
    }
}

// The same of codes of 4 bits; `value` gets the codes of 16 rows in the lowest bits of 32, anything above them.
template <class Value> static inline void widen_nibbles(const uint8_t *half, Value value, uint8_t *out) {
    for (int j = 0; j < 4; ++j) {
        const __m512i q = _mm512_loadu_si512(half + 64 * j);
        const auto at = [&](int bits) { return value(_mm512_srli_epi32(q, static_cast<unsigned>(bits))); };
        _mm512_store_si512(out + 128 * j, pairs_of(at(0), at(8)));
        _mm512_store_si512(out + 128 * j + 64, pairs_of(at(16), at(24)));
        _mm512_store_si512(out + 512 + 128 * j, pairs_of(at(4), at(12)));
        _mm512_store_si512(out + 512 + 128 * j + 64, pairs_of(at(20), at(28)));
    }
}

static inline void widen_int4(const HalfTile &half, __m512 scale, uint8_t *out) {
    const __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(half.zeros)));
    const __m512 zero = _mm512_mul_ps(_mm512_cvtepi32_ps(zeros), _mm512_set1_ps(0.0625f));
    const __m512i low = _mm512_set1_epi32(15);
    const __m512 offset = _mm512_mul_ps(scale, zero);
    const auto value = [&](__m512i q) {
        return _mm512_fmsub_ps(_mm512_cvtepi32_ps(_mm512_and_si512(q, low)), scale, offset);
    };
    widen_nibbles(half.weights, value, out);
}

static inline void widen_lut4(const HalfTile &half, __m512 scale, uint8_t *out) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(half.table));
    const __m512 table = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    const auto value = [&](__m512i q) { return _mm512_mul_ps(_mm512_permutexvar_ps(q, table), scale); };
    widen_nibbles(half.weights, value, out);
}

Panel prepare(const SwitchyardMatrix &matrix, int64_t block, int64_t count, uint8_t *room) {
    if (kind_of(matrix) == SWITCHYARD_BF16) return prepare_rows(matrix, block, count, room);
    if (matrix.format == SWITCHYARD_BLOCKS) return copy_rows(matrix, block, count, room);
    const TileRow row = tile_row(matrix, block);
    const Format &format = kFormats[matrix.format];
    constexpr int64_t ahead = 4096;
    for (int64_t group = 0; group < row.groups; ++group)
        for (int64_t half = 0; half < 2; ++half) {
            const HalfTile tile = half_tile(row, format, group, half);
            uint8_t *out = room + (2 * group + half) * kTileBytes;
            for (int64_t line = 0; line < format.half_bytes(); line += 64)
                _mm_prefetch(reinterpret_cast<const char *>(tile.weights) + line + ahead, _MM_HINT_T0);
            const __m512 scale = format.half_scales ? half_scales_of(tile.scales) : scales_of(tile.scales);
            if (matrix.format == SWITCHYARD_INT8)
                widen_int8(tile.weights, scale, out);
            else if (matrix.format == SWITCHYARD_INT4)
                widen_int4(tile, scale, out);
            else
                widen_lut4(tile, scale, out);
        }
    return {room, room + kTileBytes, 0};
}

// Transposes `tile` [rows, vectors] into `out` [vectors, 32].
static inline void store_turned(const float *tile, float *out) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(tile + 16 * i);
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * kTileRows, r[i]);
}

#define SWITCHYARD_STORE_TURNED(number, to)  \
    do {                                     \
        _tile_stored(number, turned, 64);    \
        store_turned(turned, to);            \
    } while (0)

// Weights in bf16: tiles 0 to 3 are the sums of two halves with two tiles of vectors.
void multiply_plain(const Panel &panel, int64_t groups, const uint8_t *x, int64_t tiles, float *out) {
    alignas(64) float turned[256];
    const int64_t tile = groups * kTileBytes;
    const auto stride = static_cast<size_t>(panel.stride);
    for (; tiles >= 2; tiles -= 2, x += 2 * tile, out += 2 * 16 * kTileRows) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t group = 0; group < groups; ++group) {
            _tile_loadd(4, panel.upper + group * 64, stride);
            _tile_loadd(6, x + group * kTileBytes, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, x + tile + group * kTileBytes, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, panel.lower + group * 64, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        SWITCHYARD_STORE_TURNED(0, out);
        SWITCHYARD_STORE_TURNED(1, out + 16 * kTileRows);
        SWITCHYARD_STORE_TURNED(2, out + kHalfRows);
        SWITCHYARD_STORE_TURNED(3, out + 16 * kTileRows + kHalfRows);
    }
    if (tiles == 0) return;
    _tile_zero(0);
    _tile_zero(2);
    for (int64_t group = 0; group < groups; ++group) {
        _tile_loadd(6, x + group * kTileBytes, 64);
        _tile_loadd(4, panel.upper + group * 64, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, panel.lower + group * 64, stride);
        _tile_dpbf16ps(2, 5, 6);
    }
    SWITCHYARD_STORE_TURNED(0, out);
    SWITCHYARD_STORE_TURNED(2, out + kHalfRows);
}

// Widened weights: tiles 0 to 3 are the sums of two tiles of vectors with two halves.
void multiply_widened(const Panel &panel, int64_t groups, const uint8_t *x, int64_t tiles, float *out) {
    constexpr size_t row = kTileRows * sizeof(float);
    const int64_t tile = groups * kTileBytes;
    for (; tiles >= 2; tiles -= 2, x += 2 * tile, out += 2 * 16 * kTileRows) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t group = 0; group < groups; ++group) {
            _tile_loadd(4, x + group * kTileBytes, 64);
            _tile_loadd(6, panel.upper + 2 * group * kTileBytes, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel.lower + 2 * group * kTileBytes, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + tile + group * kTileBytes, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, row);
        _tile_stored(1, out + kHalfRows, row);
        _tile_stored(2, out + 16 * kTileRows, row);
        _tile_stored(3, out + 16 * kTileRows + kHalfRows, row);
    }
    if (tiles == 0) return;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t group = 0; group < groups; ++group) {
        _tile_loadd(4, x + group * kTileBytes, 64);
        _tile_loadd(6, panel.upper + 2 * group * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel.lower + 2 * group * kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, row);
    _tile_stored(1, out + kHalfRows, row);
}

void multiply(int32_t format, int64_t columns, const Panel &panel, const uint8_t *x, int64_t count, float *out) {
    const int64_t tiles = (count + kPairLanes - 1) / kPairLanes;
    const Tiles in_use;
    if (is_in_rows(format))
        multiply_plain(panel, groups_of(columns), x, tiles, out);
    else
        multiply_widened(panel, groups_of(columns), x, tiles, out);
}

}  // namespace

static const ManyKernels kMany = {kPairLanes, {2, 12, 12, 12, 20}, packed_tiles, panel_room, pack_tile, prepare,
                                  multiply, activate_rows, add_rows, soften_row, carry_rows, narrow_rows};
extern const ManyKernels *const kAmxMany = &kMany;
#else
extern const ManyKernels *const kAmxMany = nullptr;
#endif
