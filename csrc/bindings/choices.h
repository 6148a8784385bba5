// How the choices of a step come over from Python: one tuple of arrays.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <tuple>
#include <vector>

#include "../model/choose.h"

namespace kvarn {

namespace nb = nanobind;

template <class T>
using In1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class Array>
auto view(const Array& array) {
    return std::span(array.data(), array.size());
}

// RowSampling of every row, as arrays:
//   numbers (rows, 10) float  temperature, top_p, min_p, typical_p, repetition, presence, frequency penalty,
//                             XTC probability, XTC threshold, CFG scale
//   wholes (rows, 5) uint64   top_k, seed, choice, position, draw
//   bias_ids, bias_values     of all rows one after the other; row i has [bias_starts[i], bias_starts[i + 1])
//   bias_starts (rows + 1)
//   seen_ids, seen_counts     likewise with seen_starts
//   masked_rows (m)           rows that have a mask
//   masks (m, words)          theirs
using ChoiceArrays = std::tuple<In2<float>, In2<uint64_t>, In1<int32_t>, In1<float>, In1<int32_t>, In1<int32_t>,
                                In1<int32_t>, In1<int32_t>, In1<int32_t>, In2<uint32_t>>;

// The choices keep views of the arrays. Throws when they do not fit together.
std::vector<Choice> read_choices(const ChoiceArrays& arrays);

}  // namespace kvarn
