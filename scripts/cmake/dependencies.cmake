# Every third-party library, found once. ARCHITECTURE.md: one library, one folder that may include it.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Boost REQUIRED)  # Interprocess, header-only
find_package(MPI REQUIRED COMPONENTS CXX)

set(HDF5_PREFER_PARALLEL FALSE)
find_package(HDF5 REQUIRED COMPONENTS C)

find_package(PkgConfig REQUIRED)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
find_package(ZLIB REQUIRED)                          # CRC-32 of zip entries, gzip
pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET libzstd)
# Tokenizers: regular expressions, Unicode, SentencePiece models.
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
find_path(SENTENCEPIECE_INCLUDE_DIR sentencepiece_processor.h REQUIRED)
find_library(SENTENCEPIECE_LIBRARY sentencepiece REQUIRED)  # its package file would link the trainer too
pkg_check_modules(SENTENCEPIECE REQUIRED sentencepiece)     # its version, which no header has
add_library(ds_sentencepiece INTERFACE)
target_include_directories(ds_sentencepiece SYSTEM INTERFACE ${SENTENCEPIECE_INCLUDE_DIR})
target_link_libraries(ds_sentencepiece INTERFACE ${SENTENCEPIECE_LIBRARY})

pkg_check_modules(SODIUM REQUIRED IMPORTED_TARGET libsodium)    # SipHash, of the launcher's handshake
pkg_check_modules(URING REQUIRED IMPORTED_TARGET liburing)      # files of what is offloaded
pkg_check_modules(SIMDJSON REQUIRED IMPORTED_TARGET simdjson)   # lines of JSONL
pkg_check_modules(SECCOMP REQUIRED IMPORTED_TARGET libseccomp)  # what a process that parses foreign files may call

# oneDNN's own package file fails without OpenCL headers, so it is found by hand.
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp REQUIRED)
find_library(DNNL_LIBRARY dnnl REQUIRED)
add_library(ds_dnnl INTERFACE)
target_include_directories(ds_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
# gomp: oneDNN runs on OpenMP threads, and omp_set_num_threads is how each of our threads keeps it to itself.
target_link_libraries(ds_dnnl INTERFACE ${DNNL_LIBRARY} gomp)

# Apache Arrow, of which Debian has no package. Found nothing: DS_ARROW is OFF from here on, and the tools say so when asked.
if(NOT DS_ARROW STREQUAL "OFF")
  add_library(ds_arrow INTERFACE)
  if(DS_ARROW_ROOT)
    file(GLOB DS_ARROW_LIBRARIES ${DS_ARROW_ROOT}/libarrow.so* ${DS_ARROW_ROOT}/libparquet.so* ${DS_ARROW_ROOT}/lib/libarrow.so
      ${DS_ARROW_ROOT}/lib/libparquet.so)
    target_include_directories(ds_arrow SYSTEM INTERFACE ${DS_ARROW_ROOT}/include)
    target_link_libraries(ds_arrow INTERFACE ${DS_ARROW_LIBRARIES})
  else()
    find_package(Arrow QUIET)
    find_package(Parquet QUIET)
    if(TARGET Arrow::arrow_shared AND TARGET Parquet::parquet_shared)
      set(DS_ARROW_LIBRARIES Arrow::arrow_shared Parquet::parquet_shared)
      target_link_libraries(ds_arrow INTERFACE ${DS_ARROW_LIBRARIES})
    endif()
  endif()
  if(DS_ARROW_LIBRARIES)
    set(DS_ARROW ON)
    target_compile_definitions(ds_arrow INTERFACE DS_ARROW)
  elseif(DS_ARROW STREQUAL "ON")
    message(FATAL_ERROR "DS_ARROW is ON, but there is no Apache Arrow: name its place in DS_ARROW_ROOT")
  else()
    set(DS_ARROW OFF)
  endif()
endif()

# CUDA: the compiler and the headers. Found nothing: DS_CUDA is OFF from here on, and the tools say so when asked.
if(NOT DS_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(DS_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)  # often not on the PATH
    if(DS_NVCC)
      set(CMAKE_CUDA_COMPILER ${DS_NVCC} CACHE FILEPATH "The CUDA compiler")
    endif()
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${DS_CUDA_ARCHITECTURES})
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    add_library(ds_cuda_headers INTERFACE)
    target_include_directories(ds_cuda_headers SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
    find_library(BOOST_CONTEXT_LIBRARY boost_context REQUIRED)  # the fibers of the simulator
    set(DS_CUDA ON)
  elseif(DS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DS_CUDA is ON, but there is no nvcc")
  else()
    set(DS_CUDA OFF)
  endif()
endif()
message(STATUS "CUDA plug-in: ${DS_CUDA} ${CMAKE_CUDA_COMPILER_VERSION}")
