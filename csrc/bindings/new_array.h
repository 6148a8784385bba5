// Results of the kernels as new NumPy arrays.
#pragma once
#include <initializer_list>

#include "arrays.h"

namespace kvarn {

template <class T>
using Array = nb::ndarray<nb::numpy, T>;

template <class T>
struct NewArray {
    T* data;
    Array<T> array;

    explicit NewArray(std::initializer_list<size_t> shape) {
        size_t size = 1;
        for (size_t length : shape) size *= length;
        data = new T[size]();
        array = Array<T>(data, shape, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); }));
    }
};

}  // namespace kvarn
