# argosy_add_test(NAME area SOURCES a_test.cc ... [LABELS x y])
#
# One GoogleTest binary argosy_test_<area>. Tests may include internal headers of src/ and tests/support/.
# ARGOSY_TESTDATA names the folder testdata/ of the source tree.
function(argosy_add_test)
  cmake_parse_arguments(ARG "" "NAME" "SOURCES;LABELS" ${ARGN})
  set(target argosy_test_${ARG_NAME})
  add_executable(${target} ${ARG_SOURCES} ${PROJECT_SOURCE_DIR}/tests/support/sanitizer_options.cc)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests
    ${XXHASH_INCLUDE_DIR})
  target_compile_definitions(${target} PRIVATE ARGOSY_TESTDATA="${PROJECT_SOURCE_DIR}/testdata")
  target_link_libraries(${target} PRIVATE argosy argosy_compile fmt::fmt nlohmann_json::nlohmann_json
    GTest::gtest GTest::gtest_main)
  gtest_discover_tests(${target} PROPERTIES TIMEOUT 300 LABELS "${ARG_NAME};${ARG_LABELS}"
    DISCOVERY_TIMEOUT 60)
endfunction()
