# What `cmake --install` lays down, and how find_package(argosy) finds it. Test: tests/package/.
#
# Public headers, the static library, the tool, the licence and the documents. Consumers need fmt, zlib and threads to
# link; nlohmann-json, xxHash and CLI11 stay behind the library. No installed file names a folder of the build, so
# the prefix may be moved (docs/adr/0009).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/argosy)
install(TARGETS argosy EXPORT argosyTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT argosyTargets NAMESPACE argosy:: DESTINATION ${package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/argosy DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(TARGETS argosy_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/argosyConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/package/argosyConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/package/argosyConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/package/argosyConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/package/argosyConfigVersion.cmake
  DESTINATION ${package_dir})
