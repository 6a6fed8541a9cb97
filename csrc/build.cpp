// Version, compiler and targets of this build of the extension.
#include "families.h"

#define WEFT_TEXT_(x) #x
#define WEFT_TEXT(x) WEFT_TEXT_(x)

namespace weft {

void register_build(pybind11::module_& m) {
  pybind11::dict build;
  build["version"] = WEFT_TEXT(WEFT_VERSION);
  build["compiler"] = __VERSION__;
#if defined(__x86_64__)
  build["architecture"] = "x86_64";
#elif defined(__aarch64__)
  build["architecture"] = "aarch64";
#else
  build["architecture"] = "other";
#endif
#if defined(WEFT_CUDA_VERSION)
  build["cuda"] = WEFT_TEXT(WEFT_CUDA_VERSION);
  build["cuda_architectures"] = WEFT_TEXT(WEFT_CUDA_ARCHITECTURES);
#else
  build["cuda"] = pybind11::none();
  build["cuda_architectures"] = pybind11::none();
#endif
  m.attr("build") = build;
}

}  // namespace weft
