# cmake --install: a prefix that may be moved. Tools find libds.so beside them through $ORIGIN, the package config finds
# its files relative to itself; find_package(libds) gives libds::ds.
include(CMakePackageConfigHelpers)

file(RELATIVE_PATH library_from_tool /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
set_target_properties(${DS_TOOLS} PROPERTIES INSTALL_RPATH "$ORIGIN/${library_from_tool}")
set_target_properties(ds_kernels_headers PROPERTIES EXPORT_NAME kernels_headers)

install(TARGETS ${DS_TOOLS} RUNTIME)
install(TARGETS ds ds_kernels_headers EXPORT libds LIBRARY NAMELINK_COMPONENT development)
install(DIRECTORY libds/include/ds kernels/include/ds DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)

# If LD_LIBRARY_PATH names no CUDA libraries: beside the plug-in, then where NVIDIA's installer puts them.
if(TARGET ds_cuda)
  set_target_properties(ds_cuda PROPERTIES INSTALL_RPATH "$ORIGIN:/usr/local/cuda/lib64")
  target_link_options(ds_cuda PRIVATE -Wl,--enable-new-dtags)
  install(TARGETS ds_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} OPTIONAL)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/libds)
install(EXPORT libds NAMESPACE libds:: FILE libdsConfig.cmake DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/libdsConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/libdsConfigVersion.cmake DESTINATION ${package_dir})

foreach(section 1 3 5 7)
  file(GLOB pages CONFIGURE_DEPENDS man/*.${section})
  install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section})
endforeach()
install(FILES LICENSE CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY configs DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN *.json)
install(DIRECTORY tests/examples DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN *.h PATTERN *.cc)

# Each tool writes its own completions.
set(bash_dir ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
set(zsh_dir ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
set(fish_dir ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
foreach(tool ${DS_TOOLS})
  set(bash ${PROJECT_BINARY_DIR}/completions/${tool})
  set(zsh ${PROJECT_BINARY_DIR}/completions/_${tool})
  set(fish ${PROJECT_BINARY_DIR}/completions/${tool}.fish)
  add_custom_command(OUTPUT ${bash} ${zsh} ${fish} DEPENDS ${tool} VERBATIM
    COMMAND ${tool} --completion bash > ${bash}
    COMMAND ${tool} --completion zsh > ${zsh}
    COMMAND ${tool} --completion fish > ${fish})
  list(APPEND completions ${bash} ${zsh} ${fish})
  install(FILES ${bash} DESTINATION ${bash_dir})
  install(FILES ${zsh} DESTINATION ${zsh_dir})
  install(FILES ${fish} DESTINATION ${fish_dir})
endforeach()
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/completions)
add_custom_target(ds_completions ALL DEPENDS ${completions})
