// SPDX-License-Identifier: Apache-2.0
// What libds looks for in libcudnn.so.9, of a version that it refuses.

#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
EXPORT size_t cudnnGetVersion(void) { return 91000; }
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
