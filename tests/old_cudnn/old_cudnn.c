// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcudnn.so.9 with the symbols that libds looks up, of a version that it refuses.

#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#ifdef PART
// As the real one: its parts are opened by the first call, and stay.
#include <dlfcn.h>
EXPORT size_t cudnnGetVersion(void) { return dlopen(PART, RTLD_NOW | RTLD_NODELETE) != NULL ? 91000 : 0; }
#else
EXPORT size_t cudnnGetVersion(void) { return 91000; }
#endif
#define UNUSED(name) \
  EXPORT int name(void) { return 1; }
UNUSED(cudnnGetErrorString)
UNUSED(cudnnGetLastErrorString)
UNUSED(cudnnCreate)
UNUSED(cudnnDestroy)
UNUSED(cudnnSetStream)
UNUSED(cudnnBackendCreateDescriptor)
UNUSED(cudnnBackendDestroyDescriptor)
UNUSED(cudnnBackendSetAttribute)
UNUSED(cudnnBackendGetAttribute)
UNUSED(cudnnBackendFinalize)
UNUSED(cudnnBackendExecute)
