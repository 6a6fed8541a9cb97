#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "errors.h"
#include "handover.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace weft::shm {

namespace {

constexpr size_t huge_page_bytes = 2 << 20;

std::string no_memory(size_t bytes) {
  return "cannot reserve " + std::to_string(bytes) +
         " bytes of shared memory for a group; free memory, raise the container's memory limit or lower "
         "WEFT_STAGING_KIB";
}

int create_descriptor(size_t bytes) {
  int fd = memfd_create("weft", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("weft", MFD_CLOEXEC | MFD_ALLOW_SEALING);  // before Linux 6.3
  if (fd < 0) throw_errno(errno, "memfd_create failed");
  int error = 0;
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) error = errno;
  // Sealed against shrinking, so that no rank can make another's access fault.
  if (error == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) error = errno;
  if (error != 0) {
    ::close(fd);
    throw_errno(error, no_memory(bytes));
  }
  return fd;
}

}  // namespace

Segment Segment::create(size_t bytes) { return Segment(create_descriptor(bytes), bytes); }

Segment Segment::open(uint64_t creator, int creator_descriptor, size_t bytes) {
  const int fd = descriptor_of(creator, creator_descriptor);
  struct stat status;
  if (fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) {
    ::close(fd);
    throw_errno(EINVAL, "the group's shared memory is not a segment of " + std::to_string(bytes) +
                            " bytes; every rank must run the same version of weft with the same WEFT_STAGING_KIB");
  }
  return Segment(fd, bytes);
}

void Segment::reserve(size_t offset, size_t bytes) {
#ifdef MADV_POPULATE_WRITE  // a page is huge only if it is reserved by an access to memory that has asked for it
  if (bytes >= huge_page_bytes && madvise(data_ + offset, bytes, MADV_HUGEPAGE) == 0)
    madvise(data_ + offset, bytes, MADV_POPULATE_WRITE);
#endif
  // fallocate, not posix_fallocate, which writes page by page if the file system lacks support.
  while (fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) throw_errno(errno, no_memory(bytes));
}

Segment::Segment(int descriptor, size_t bytes) : descriptor_(descriptor), bytes_(bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    close_descriptor();
    throw_errno(error, "cannot map " + std::to_string(bytes) + " bytes of shared memory");
  }
  data_ = static_cast<std::byte*>(address);
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  close_descriptor();
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

}  // namespace weft::shm
