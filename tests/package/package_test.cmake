# cmake -DBUILD= -DSOURCE= -DWORK= -DGENERATOR= -DCOMPILER= -DVERSION= -DPYTHON= -P package_test.cmake
#
# The installed files are complete and name no folder of this machine; from a moved prefix the headers compile alone,
# examples/minimal_layer builds and gives the same bits on two ranks as on one, and examples/train_layer learns.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}: ${code}\n${text}")
  endif()
  set(output "${text}" PARENT_SCOPE)
endfunction()

function(build_project source binary)
  run(${CMAKE_COMMAND} -S ${source} -B ${binary} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF
    -DCMAKE_CXX_FLAGS=-Werror)
  run(${CMAKE_COMMAND} --build ${binary})
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/installed)
set(prefix ${WORK}/moved)
file(RENAME ${WORK}/installed ${prefix})

file(GLOB_RECURSE files RELATIVE ${prefix} ${prefix}/*)
foreach(wanted bin/argosy include/argosy/moe.h lib.*/libargosy.a lib.*/cmake/argosy/argosyConfig.cmake
    lib.*/cmake/argosy/argosyConfigVersion.cmake share/doc/argosy/LICENSE share/doc/argosy/docs/concepts.md)
  if(NOT "${files}" MATCHES "(^|;)${wanted}(;|$)")
    message(FATAL_ERROR "not installed: ${wanted}; there are: ${files}")
  endif()
endforeach()
foreach(file ${files})
  if(file MATCHES "^include/" AND NOT file MATCHES "^include/argosy/[a-z0-9_]+\\.h$")
    message(FATAL_ERROR "installed, but no public header: ${file}")
  endif()
  file(READ ${prefix}/${file} content HEX)
  foreach(folder ${SOURCE} ${BUILD} ${WORK})
    string(HEX ${folder} pattern)
    string(FIND "${content}" ${pattern} at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${folder}")
    endif()
  endforeach()
endforeach()

run(${prefix}/bin/argosy --version)
if(NOT output MATCHES "argosy ${VERSION}")
  message(FATAL_ERROR "argosy --version says ${output}, wanted ${VERSION}")
endif()

build_project(${SOURCE}/tests/package/headers ${WORK}/headers)
build_project(${SOURCE}/examples/minimal_layer ${WORK}/minimal_layer)
run(${WORK}/minimal_layer/minimal_layer)
if(NOT output MATCHES "2 ranks.*1 ranks.*digest [0-9a-f]+")
  message(FATAL_ERROR "minimal_layer says ${output}")
endif()
build_project(${SOURCE}/examples/train_layer ${WORK}/train_layer)
run(${PYTHON} ${SOURCE}/tests/package/train_layer_check.py ${WORK}/train_layer/train_layer ${SOURCE})

# A version that is not there is refused.
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE}/tests/package/headers -B ${WORK}/wrong_version -G ${GENERATOR}
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${prefix} -DARGOSY_WANTED=99.0
  RESULT_VARIABLE code OUTPUT_QUIET ERROR_VARIABLE text)
if(code EQUAL 0 OR NOT text MATCHES "99.0")
  message(FATAL_ERROR "version 99.0 was found: ${text}")
endif()
