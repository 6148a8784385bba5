#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

#include "check.h"

namespace kvarn {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
#ifdef __linux__
constexpr size_t kPage = 4096;      // no page is smaller
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14, which older headers have not
#endif

}  // namespace

PageRegion::PageRegion(size_t bytes, bool huge_pages) : bytes_(bytes) {
    if (bytes == 0) return;
    mapping_bytes_ = huge_pages ? bytes + kHugePage : bytes;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<uint8_t*>(mapping);
    data_ = mapping_;
    if (huge_pages) {
        auto address = reinterpret_cast<uintptr_t>(mapping_);
        data_ = mapping_ + ((kHugePage - address % kHugePage) % kHugePage);
#ifdef MADV_HUGEPAGE
        madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
    }
}

PageRegion::PageRegion(PageRegion&& other) noexcept { *this = std::move(other); }

PageRegion& PageRegion::operator=(PageRegion&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapping_bytes_, other.mapping_bytes_);
    return *this;
}

PageRegion::~PageRegion() {
    if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void PageRegion::release_pages(size_t offset, size_t bytes) noexcept { madvise(data_ + offset, bytes, MADV_DONTNEED); }

void PageRegion::populate([[maybe_unused]] size_t offset, [[maybe_unused]] size_t bytes) noexcept {
#ifdef __linux__
    const size_t begin = offset / kPage * kPage;
    madvise(data_ + begin, offset + bytes - begin, kPopulateWrite);
#endif
}

void Arena::reserve(size_t bytes, bool huge_pages) {
    if (bytes > region_.bytes()) region_ = PageRegion(bytes, huge_pages);
    reset();
}

void* Arena::take_bytes(size_t bytes) {
    size_t begin = used_;
    used_ += padded(bytes);
    if (used_ > region_.bytes()) throw std::logic_error("arena too small: its size was computed wrongly");
    return region_.data() + begin;
}

}  // namespace kvarn
