// Memory that is not the heap: one region of whole pages, mapped on first touch and returned as a whole.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvarn {

class PageRegion {
public:
    PageRegion() = default;
    explicit PageRegion(size_t bytes, bool huge_pages);  // throws std::bad_alloc
    PageRegion(PageRegion&& other) noexcept;
    PageRegion& operator=(PageRegion&& other) noexcept;
    PageRegion(const PageRegion&) = delete;
    PageRegion& operator=(const PageRegion&) = delete;
    ~PageRegion();

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

    // Give the pages of [offset, offset + bytes) back to the system; they read as zero afterwards.
    void release_pages(size_t offset, size_t bytes) noexcept;
    // Have the system back these pages now; what is in them stays. Where it cannot, the first touch does.
    void populate(size_t offset, size_t bytes) noexcept;

private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
    uint8_t* mapping_ = nullptr;
    size_t mapping_bytes_ = 0;
};

// Scratch of one step: sized once, handed out by moving a cursor, forgotten by reset().
class Arena {
public:
    // Grows only; whatever was handed out becomes invalid.
    void reserve(size_t bytes, bool huge_pages = false);
    void reset() { used_ = 0; }

    template <class T>
    T* take(size_t count) {
        return static_cast<T*>(take_bytes(count * sizeof(T)));
    }
    size_t capacity() const { return region_.bytes(); }
    static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

private:
    void* take_bytes(size_t bytes);

    PageRegion region_;
    size_t used_ = 0;
};

}  // namespace kvarn
