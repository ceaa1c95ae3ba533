#include "matrix.h"

#include <algorithm>

#include "rows.h"

int64_t bytes_of(const SwitchyardMatrix &matrix) {
    if (matrix.format == SWITCHYARD_BF16) return matrix.rows * matrix.columns * 2;
    if (matrix.format == SWITCHYARD_BLOCKS) {
        const auto bytes = [&](int64_t rows, int32_t number) {
            const RowType &type = *kPortableRows.of(number);
            return rows * (matrix.columns / type.elements * type.bytes);
        };
        if (!matrix.second) return bytes(matrix.rows, matrix.type);
        return bytes(matrix.rows / 2, matrix.type) + bytes(matrix.rows / 2, matrix.second_type);
    }
    const int64_t tiles = blocks_of(matrix) * groups_of(matrix.columns);
    const Format &format = kFormats[matrix.format];
    return tiles * (2 * format.half_bytes() + kTileRows * (format.has_zeros ? 3 : 2));
}

StoredRow stored_row(const RowKernels &types, const SwitchyardMatrix &matrix, int64_t row) {
    if (matrix.format == SWITCHYARD_BF16)
        return {static_cast<const uint8_t *>(matrix.weights) + row * matrix.columns * 2, types.of(kBf16Type)};
    const bool is_second = matrix.second && row >= matrix.rows / 2;
    const RowType *type = types.of(is_second ? matrix.second_type : matrix.type);
    const auto *blocks = static_cast<const uint8_t *>(is_second ? matrix.second : matrix.weights);
    if (is_second) row -= matrix.rows / 2;
    if (matrix.order) row = matrix.order[row];
    return {blocks + row * (matrix.columns / type->elements * type->bytes), type};
}

namespace {

// Whether all rows are in bf16, in one piece or as a file has them: two of them are read together.
bool is_bf16(const SwitchyardMatrix &matrix) {
    if (matrix.format != SWITCHYARD_BLOCKS) return matrix.format == SWITCHYARD_BF16;
    return matrix.type == kBf16Type && (!matrix.second || matrix.second_type == kBf16Type);
}

}  // namespace

void Vectors::resize(std::initializer_list<const SwitchyardMatrix *> matrices, int64_t count, int64_t n) {
    n_ = n;
    tiled_ = SWITCHYARD_INT8;
    bool wanted[kForms] = {};
    for (const SwitchyardMatrix *matrix : matrices) {
        if (is_bf16(*matrix)) {
            wanted[static_cast<int>(VectorForm::kSpread)] = true;
        } else if (matrix->format == SWITCHYARD_BLOCKS) {
            wanted[static_cast<int>(kPortableRows.of(matrix->type)->form)] = true;
            if (matrix->second) wanted[static_cast<int>(kPortableRows.of(matrix->second_type)->form)] = true;
        } else {
            tiled_ = matrix->format;
            wanted[static_cast<int>(VectorForm::kBy32)] = true;
        }
    }
    const int64_t whole = wide_blocks(n) * kWide;
    const int64_t bytes[kForms] = {padded(n) * 4, whole / kGroup * (kGroup + 4 + 4),
                                   whole + whole / kWide * 4 + whole / kPart * 2, whole * 4};
    stride_ = 0;
    for (int form = 0; form < kForms; ++form) {
        places_[form] = wanted[form] ? stride_ : -1;
        if (wanted[form]) stride_ += (bytes[form] + 63) & ~int64_t{63};
    }
    if (has(VectorForm::kBy256) && rests_.size() < static_cast<size_t>(count)) rests_.resize(static_cast<size_t>(count));
    const auto needed = static_cast<size_t>(count * stride_ + 64);
    if (memory_.size() < needed) memory_.resize(needed);
    start_ = memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) & 63);
}

QuantisedVector Vectors::quantised(int64_t at) const {
    uint8_t *start = form(at, VectorForm::kBy32);
    const int64_t groups = wide_blocks(n_) * (kWide / kGroup);
    auto *scales = reinterpret_cast<float *>(start + groups * kGroup);
    return {reinterpret_cast<int8_t *>(start), scales, reinterpret_cast<int32_t *>(scales + groups)};
}

RowVector Vectors::row(int64_t at, VectorForm of) const {
    uint8_t *start = form(at, of);
    RowVector row = {};
    if (of == VectorForm::kBy32) {
        const QuantisedVector vector = quantised(at);
        row.q = vector.q;
        row.scales = vector.scales;
        row.sums = vector.sums;
    } else if (of == VectorForm::kBy256) {
        row = by_256(start);
    } else {
        row.values = reinterpret_cast<float *>(start);
    }
    return row;
}

RowVector Vectors::by_256(const uint8_t *start) const {
    const int64_t blocks = wide_blocks(n_);
    RowVector row = {};
    row.q = reinterpret_cast<const int8_t *>(start);
    row.scales = reinterpret_cast<const float *>(start + blocks * kWide);
    row.parts = reinterpret_cast<const int16_t *>(start + blocks * (kWide + 4));
    return row;
}

// Zeros up to whole blocks of 256: rows are read four blocks of 32 at a time.
void Vectors::pad(int64_t at) {
    const QuantisedVector vector = quantised(at);
    const int64_t from = groups_of(n_), to = wide_blocks(n_) * (kWide / kGroup);
    std::fill(vector.q + from * kGroup, vector.q + to * kGroup, int8_t{0});
    std::fill(vector.scales + from, vector.scales + to, 0.0f);
    std::fill(vector.sums + from, vector.sums + to, 0);
}

void Vectors::set(const Kernels &kernels, int64_t at, const uint16_t *x) {
    if (has(VectorForm::kSpread)) kernels.rows->spread(x, n_, const_cast<float *>(spread(at)));
    if (has(VectorForm::kBy32)) {
        kernels.tiles[tiled_]->quantise_bf16(x, n_, quantised(at));
        pad(at);
    }
    if (!has(VectorForm::kBy256) && !has(VectorForm::kFloats)) return;
    static thread_local std::vector<float> wide;
    wide.resize(static_cast<size_t>(n_));
    for (int64_t i = 0; i < n_; ++i) wide[static_cast<size_t>(i)] = from_bf16(x[i]);
    set_rows(kernels, at, wide.data());
}

void Vectors::set(const Kernels &kernels, int64_t at, const float *x) {
    if (has(VectorForm::kSpread)) kernels.rows->spread_floats(x, n_, const_cast<float *>(spread(at)));
    if (has(VectorForm::kBy32)) {
        kernels.tiles[tiled_]->quantise_floats(x, n_, quantised(at));
        pad(at);
    }
    set_rows(kernels, at, x);
}

void Vectors::set_rows(const Kernels &kernels, int64_t at, const float *x) {
    if (has(VectorForm::kBy256)) {
        const auto quantise = [&](const float *values, const RowVector &to) {
            return kernels.types->quantise_wide(values, n_, const_cast<int8_t *>(to.q), const_cast<float *>(to.scales),
                                                const_cast<int16_t *>(to.parts));
        };
        const RowVector row = this->row(at, VectorForm::kBy256);
        std::vector<uint8_t> &rest = rests_[static_cast<size_t>(at)];
        rest.clear();
        if (quantise(x, row)) {
            rest.resize(static_cast<size_t>(wide_blocks(n_) * (kWide + 4 + kWide / kPart * 2)));
            std::vector<float> left(static_cast<size_t>(n_));
            for (int64_t i = 0; i < n_; ++i)
                left[static_cast<size_t>(i)] = x[i] - row.scales[i / kWide] * static_cast<float>(row.q[i]);
            quantise(left.data(), by_256(rest.data()));
        }
    }
    if (has(VectorForm::kFloats)) {
        auto *values = const_cast<float *>(row(at, VectorForm::kFloats).values);
        std::copy_n(x, n_, values);
        std::fill(values + n_, values + wide_blocks(n_) * kWide, 0.0f);
    }
}

namespace {

void bf16_block(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, const Vectors &x,
                const int32_t *which, int64_t count, float *out) {
    const RowOrder order(matrix);
    const auto at = [&](int64_t row) {
        return reinterpret_cast<const uint16_t *>(stored_row(*kernels.types, matrix, row).blocks);
    };
    for (int64_t i = 0; i < kHalfRows; ++i) {
        const int64_t row = block * order.block + i * order.step;
        if (row >= order.first_limit) break;
        const uint16_t *upper = at(row), *lower = row + order.partner < matrix.rows ? at(row + order.partner) : upper;
        for (int64_t v = 0; v < count; ++v)
            kernels.rows->dot_pair(upper, lower, x.spread(which[v]), matrix.columns, &out[v * kTileRows + i],
                                   &out[v * kTileRows + kHalfRows + i]);
    }
}

// A panel's memory, which lives on between calls.
class PanelRoom {
  public:
    RowPanel *of(int64_t columns) {
        const int64_t whole = wide_blocks(columns) * kWide, floats = whole / kPart * kTileRows * 4;
        const auto needed = static_cast<size_t>(whole * kTileRows + 2 * floats + 64);
        if (memory_.size() < needed) memory_.resize(needed);
        panel_.codes = memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) & 63);
        panel_.scales = reinterpret_cast<float *>(panel_.codes + whole * kTileRows);
        panel_.mins = panel_.scales + floats / 4;
        return &panel_;
    }

  private:
    std::vector<uint8_t> memory_;
    RowPanel panel_ = {};
};

// The stored rows of half a block.
class HalfRows {
  public:
    HalfRows(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, int64_t half) : kernels_(kernels), matrix_(matrix) {
        const RowOrder order(matrix);
        const int64_t first = block * order.block;
        row_ = first + half * order.partner;
        row_step_ = order.step;
        count = std::min({kHalfRows, (order.first_limit - first + order.step - 1) / order.step,
                          (matrix.rows - row_ + order.step - 1) / order.step});
        if (count <= 0) return;
        const StoredRow begin = stored_row(*kernels.types, matrix, row_);
        type = begin.type;
        const int64_t last = row_ + (count - 1) * row_step_, middle = matrix.rows / 2;
        if (matrix.order || (matrix.second && row_ < middle && last >= middle)) return;
        begin_ = begin.blocks;
        step_ = row_step_ * (matrix.columns / type->elements * type->bytes);
    }

    StoredRow operator[](int64_t i) const {
        if (begin_) return {begin_ + i * step_, type};
        return stored_row(*kernels_.types, matrix_, row_ + i * row_step_);
    }

    int64_t count;
    const RowType *type = nullptr;  // of the first

  private:
    const Kernels &kernels_;
    const SwitchyardMatrix &matrix_;
    int64_t row_, row_step_, step_ = 0;
    const uint8_t *begin_ = nullptr;  // where they lie `step_` bytes apart
};

// The rows of a block, and the types of its halves.
void put_rows(const Kernels &kernels, const BlockAt &at, const uint8_t **rows, const RowType **types) {
    for (int64_t half = 0; half < 2; ++half) {
        const HalfRows own(kernels, at.matrix, at.block, half);
        for (int64_t i = 0; i < own.count; ++i) rows[half * kHalfRows + i] = own[i].blocks;
        types[half] = own.type;
    }
}

// All rows unpacked once for many vectors. Halves of two types are two panels.
void panel_of_block(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, const Vectors &x,
                    const int32_t *which, int64_t count, const BlockAt *next, float *out) {
    static thread_local PanelRoom room;
    static thread_local std::vector<RowVector> vectors;
    static thread_local std::vector<float> of_half, of_rests;
    static thread_local std::vector<int64_t> with_rest;
    const uint8_t *rows[2 * kTileRows] = {};  // and those that are multiplied next
    const RowType *types[2] = {}, *next_types[2] = {};
    put_rows(kernels, {matrix, block}, rows, types);
    if (next) put_rows(kernels, *next, rows + kTileRows, next_types);
    if (next_types[0] != types[0] || next_types[1] != types[1] || (next && next->matrix.columns != matrix.columns))
        std::fill_n(rows + kTileRows, kTileRows, nullptr);
    vectors.resize(static_cast<size_t>(count));
    const auto multiply = [&](const RowType &type, const uint8_t *const *mine, float *to) {
        for (int64_t v = 0; v < count; ++v) vectors[static_cast<size_t>(v)] = x.row(which[v], type.form);
        const bool few = type.multiply_few && count <= kMostRowVectors;
        RowPanel *panel = room.of(matrix.columns);
        if (!few) type.unpack_panel(mine, matrix.columns, panel);
        const auto products = [&](int64_t some, float *out) {
            if (few) return type.multiply_few(mine, matrix.columns, vectors.data(), some, out);
            type.multiply(*panel, matrix.columns, vectors.data(), some, out);
        };
        products(count, to);
        if (type.form != VectorForm::kBy256) return;
        with_rest.clear();
        for (int64_t v = 0; v < count; ++v)
            if (x.has_rest(which[v])) with_rest.push_back(v);
        if (with_rest.empty()) return;
        const auto rests = static_cast<int64_t>(with_rest.size());
        for (int64_t v = 0; v < rests; ++v) vectors[static_cast<size_t>(v)] = x.rest(which[with_rest[static_cast<size_t>(v)]]);
        of_rests.resize(static_cast<size_t>(rests * kTileRows));
        products(rests, of_rests.data());
        for (int64_t v = 0; v < rests; ++v)
            for (int64_t i = 0; i < kTileRows; ++i)
                to[with_rest[static_cast<size_t>(v)] * kTileRows + i] += of_rests[static_cast<size_t>(v * kTileRows + i)];
    };
    if (!types[1] || types[1] == types[0]) return multiply(*types[0], rows, out);
    const uint8_t *lower[2 * kTileRows] = {};
    for (const int64_t from : {kHalfRows, kTileRows + kHalfRows}) std::swap_ranges(rows + from, rows + from + kHalfRows, lower + from);
    multiply(*types[0], rows, out);
    of_half.resize(static_cast<size_t>(count * kTileRows));
    multiply(*types[1], lower, of_half.data());
    for (int64_t v = 0; v < count; ++v)
        std::copy_n(&of_half[static_cast<size_t>(v * kTileRows + kHalfRows)], kHalfRows, out + v * kTileRows + kHalfRows);
}

// Products of a few vectors are those of each alone, of which each row is multiplied by itself where that is as fast.
bool joins_rows(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t count) {
    const auto joins = [&](int32_t number) {
        const RowType &type = *kernels.types->of(number);
        return type.unpack_panel && (type.multiply_few || count > kernels.alone) && count >= type.fewest;
    };
    return joins(matrix.type) && (!matrix.second || joins(matrix.second_type));
}

// Rows one after the other: each is read from begin to end.
void rows_of_block(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, const Vectors &x,
                   const int32_t *which, int64_t count, float *out, const BlockAt *next) {
    if (joins_rows(kernels, matrix, count)) {
        const BlockAt after = {matrix, block + 1};
        return panel_of_block(kernels, matrix, block, x, which, count, next ? next : &after, out);
    }
    for (int64_t half = 0; half < 2; ++half) {
        const HalfRows rows(kernels, matrix, block, half);
        for (int64_t i = 0; i < rows.count; ++i) {
            const StoredRow stored = rows[i];
            for (int64_t from = 0; from < count; from += kMostRowVectors) {
                const auto some = static_cast<int>(std::min<int64_t>(kMostRowVectors, count - from));
                RowVector vectors[kMostRowVectors];
                float dots[kMostRowVectors];
                for (int v = 0; v < some; ++v) vectors[v] = x.row(which[from + v], stored.type->form);
                stored.type->dot(stored.blocks, matrix.columns, vectors, some, dots);
                for (int v = 0; v < some; ++v) {
                    if (stored.type->form != VectorForm::kBy256 || !x.has_rest(which[from + v])) continue;
                    float more;
                    const RowVector rest = x.rest(which[from + v]);
                    stored.type->dot(stored.blocks, matrix.columns, &rest, 1, &more);
                    dots[v] += more;
                }
                for (int v = 0; v < some; ++v) out[(from + v) * kTileRows + half * kHalfRows + i] = dots[v];
            }
        }
    }
}

}  // namespace

void block_dot(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, const Vectors &x,
               const int32_t *which, int64_t count, float *out, const BlockAt *next) {
    if (is_bf16(matrix)) return bf16_block(kernels, matrix, block, x, which, count, out);
    if (matrix.format == SWITCHYARD_BLOCKS) return rows_of_block(kernels, matrix, block, x, which, count, out, next);
    const TileRow row = tile_row(matrix, block);
    const TileKernels &tiles = *kernels.tiles[matrix.format];
    if (count == 1) {  // decoding: the memory waits for whatever is done between blocks
        const QuantisedVector vector = x.quantised(*which);
        return tiles.formats[matrix.format].dot(row, &vector, 1, out);
    }
    const int64_t parts = (count + tiles.most - 1) / tiles.most;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
        QuantisedVector vectors[kMostVectors];
        for (int64_t v = begin; v < end; ++v) vectors[v - begin] = x.quantised(which[v]);
        tiles.formats[matrix.format].dot(row, vectors, static_cast<int>(end - begin), out + begin * kTileRows);
    }
}
