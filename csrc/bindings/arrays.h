// NumPy arrays as the bindings take them: contiguous, on the CPU, of an exact number of dimensions.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>

namespace kvarn {

namespace nb = nanobind;

template <class T>
using In1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class Array>
auto view(const Array& array) {
    return std::span(array.data(), array.size());
}

// Attribute `name` of a Python object.
template <class T>
T field(nb::handle object, const char* name) {
    return nb::cast<T>(object.attr(name));
}

}  // namespace kvarn
